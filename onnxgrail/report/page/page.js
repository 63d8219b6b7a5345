"use strict";
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = document.getElementById(button.dataset.copy);
    let done = false;
    try {
      await navigator.clipboard.writeText(code.textContent);
      done = true;
    } catch {
      // A page from a file may not use the clipboard: select the text, so that one key copies it.
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
const shown = document.getElementById("shown");
for (const dot of document.querySelectorAll("[data-shows]")) {
  const show = () => { shown.textContent = document.getElementById(dot.dataset.shows).textContent; };
  dot.addEventListener("pointerenter", show);
  dot.addEventListener("focus", show);
}

for (const bar of document.querySelectorAll(".controls")) {
  const body = document.getElementById(bar.dataset.rows);
  const rows = [...body.rows], words = rows.map((row) => row.textContent.toLowerCase());
  const [search, kind, order] = bar.querySelectorAll("input, select");
  const byName = (a, b) => a.dataset.name.localeCompare(b.dataset.name, undefined, { numeric: true });
  const update = () => {
    const key = order.value, wanted = search.value.trim().toLowerCase();
    const fits = (row, n) => (!kind.value || row.dataset.kind === kind.value) && words[n].includes(wanted);
    rows.forEach((row, n) => { row.hidden = !fits(row, n) || (key !== "" && row.dataset.name === undefined); });
    const named = rows.filter((row) => row.dataset.name !== undefined);
    named.sort(key === "name" ? byName : (a, b) => Number(b.dataset[key] ?? -1) - Number(a.dataset[key] ?? -1));
    body.append(...(key ? named : rows));
    bar.querySelector("p").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  for (const part of [search, kind, order]) part.addEventListener("input", update);
  bar.hidden = false;
}
// A phone shows the summary first: long sections are folded until a link or a click opens them.
const folds = [...document.querySelectorAll("details.fold")];
if (matchMedia("(max-width: 44rem)").matches) for (const fold of folds) fold.open = false;
const unfold = (hash) => {
  const fold = hash.length > 1 && document.getElementById(hash.slice(1))?.closest("section")?.querySelector("details.fold");
  if (fold) fold.open = true;
};
for (const link of document.querySelectorAll("a[href^='#']")) link.addEventListener("click", () => unfold(link.hash));
addEventListener("beforeprint", () => { for (const fold of folds) fold.open = true; });
unfold(location.hash);
