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
