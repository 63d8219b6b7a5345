{
  const data = JSON.parse(document.getElementById("figures").textContent);
  const ways = ["removed", "repaired", "merged", "default"], levels = data.levels, side = data.dense.side;
  const slider = document.getElementById("gone"), told = document.getElementById("told"), live = document.getElementById("live");
  const cells = [...document.querySelectorAll(".channels li")], rows = [...document.querySelectorAll("#now tbody tr")];
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const score = (one) => `${percent(one.accuracy)} (${one.interval.map((end) => (100 * end).toFixed(1)).join("–")})`;
  const whole = Object.fromEntries(ways.map((way) => [way, { ...data.dense, error: 0 }]));

  const draw = (name, map) => {
    const place = document.getElementById(name);
    if (!place.firstChild) {
      for (let n = 0; n < side * side; n++) {
        const pixel = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        for (const [key, value] of [["x", n % side], ["y", Math.floor(n / side)], ["width", 1.02], ["height", 1.02]]) pixel.setAttribute(key, value);
        place.append(pixel);
      }
    }
    [...place.children].forEach((pixel, n) => {
      const value = 2 * levels.indexOf(map[n]) / (levels.length - 1) - 1;
      pixel.setAttribute("class", value < 0 ? "down" : "up");
      pixel.setAttribute("fill-opacity", Math.abs(value).toFixed(2));
    });
  };

  const mark = (step, gone) => {
    const merged = document.querySelector("input[name=how]:checked").value === "merged";
    const groups = step.groups, sizes = new Map(), letters = new Map();
    for (const group of groups ?? []) sizes.set(group, (sizes.get(group) ?? 0) + 1);
    cells.forEach((cell, n) => {
      const shared = merged && groups && sizes.get(groups[n]) > 1;
      if (shared && !letters.has(groups[n])) letters.set(groups[n], String.fromCharCode(65 + letters.size));
      const out = !merged && gone > 0 && !step.kept.includes(n);
      cell.className = out ? "gone" : shared ? "with" : "";
      cell.textContent = shared ? letters.get(groups[n]) : n;
      cell.setAttribute("aria-label", `channel ${n}: ${out ? "removed" : shared ? `merged into ${letters.get(groups[n])}` : "stays"}`);
    });
  };

  const update = () => {
    const gone = Number(slider.value), step = gone ? data.steps[gone - 1] : whole;
    told.textContent = `${gone} of ${data.width} (${Math.round(100 * gone / data.width)} %)`;
    slider.setAttribute("aria-valuetext", `${gone} of ${data.width} channels`);
    mark(step, gone);
    ways.forEach((way, n) => {
      const [error, accuracy] = rows[n].querySelectorAll("td");
      error.textContent = percent(step[way].error);
      accuracy.textContent = score(step[way]);
      for (const [key, most] of [["error", data.most], ["accuracy", 1]]) {
        const dot = document.querySelector(`#${key}-${way}`);
        dot.setAttribute("cx", `${100 * gone / (data.width - 1)}%`);
        dot.setAttribute("cy", `${100 * (1 - step[way][key] / most)}%`);
      }
    });
    for (const line of document.querySelectorAll(".at")) for (const end of ["x1", "x2"]) line.setAttribute(end, `${100 * gone / (data.width - 1)}%`);
    for (const way of ["removed", "repaired"]) draw(`map-${way}`, step[way].map);
    live.textContent = `${gone} channels gone: accuracy ${percent(step.removed.accuracy)} without repair, ${percent(step.repaired.accuracy)} with it`;
  };

  draw("map-input", data.dense.input);
  draw("map-dense", data.dense.map);
  for (const part of document.querySelectorAll(".slide input, .how input")) part.addEventListener("input", update);
  for (const part of document.querySelectorAll(".needs-script")) part.hidden = false;
  update();
}
