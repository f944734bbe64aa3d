// Sorting, choosing and values of points. Without this script the page has everything but these.
addEventListener("DOMContentLoaded", () => {
  const every = (where, what) => [...where.querySelectorAll(what)];
  const made = (what, text, className) => Object.assign(document.createElement(what), { textContent: text, className });

  // Methods that are shown: rows, curves, panels and legends.
  const runs = document.querySelector(".runs");
  function choose() {
    const off = new Set(every(runs, "input:not(:checked)").map((box) => box.value));
    for (const one of every(document, "[data-run]")) one.classList.toggle("off", off.has(one.dataset.run));
  }
  if (runs) {
    runs.hidden = false;
    runs.addEventListener("change", choose);
    const all = made("button", "all", "small"), none = made("button", "none", "small");
    for (const [button, checked] of [[all, true], [none, false]]) {
      button.type = "button";
      button.onclick = () => { for (const box of every(runs, "input")) box.checked = checked; choose(); };
      runs.append(button);
    }
    choose();
  }

  // Columns are sorted by their heads: rising, falling, and as they were.
  const collator = new Intl.Collator("en", { numeric: true });
  const number = (text) => parseFloat(text.trim().replace("−", "-").replace("+", "").replaceAll(",", ""));
  const cell = (row, place) => row.cells[place].textContent;
  function sort(table, place) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], head = heads[place];
    table.original ??= [...body.rows];
    const next = { none: "ascending", ascending: "descending", descending: "none" }[head.ariaSort ?? "none"];
    for (const one of heads) one.ariaSort = "none";
    head.ariaSort = next;
    table.classList.toggle("sorted", next !== "none");
    const rows = [...table.original], empty = (text) => !text.trim();
    const numeric = rows.every((row) => empty(cell(row, place)) || !isNaN(number(cell(row, place))));
    const way = next === "descending" ? -1 : 1;
    if (next !== "none") {
      rows.sort((a, b) => {
        const [x, y] = [cell(a, place), cell(b, place)];
        if (empty(x) || empty(y)) return empty(x) - empty(y); // what was not measured comes last
        return way * (numeric ? number(x) - number(y) : collator.compare(x.trim(), y.trim()));
      });
    }
    body.append(...rows);
  }

  function markdown(table) {
    const line = (cells) => `| ${cells.map((text) => text.trim().replaceAll("|", "\\|")).join(" | ")} |`;
    const [head, ...rows] = [...table.rows].filter((row) => !row.classList.contains("off"));
    const side = [...head.cells].map((one) => (one.classList.contains("name") ? "---" : "---:"));
    const texts = (row) => [...row.cells].map((one) => one.firstChild?.nodeType === 3 ? one.firstChild.data : one.textContent);
    return [line(texts(head)), line(side), ...rows.map((row) => line(texts(row)))].join("\n") + "\n";
  }
  async function copy(text) {
    try { return await navigator.clipboard.writeText(text); } catch { /* not allowed here: the old way */ }
    const area = document.body.appendChild(made("textarea", text, ""));
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  for (const table of every(document, "table")) {
    [...table.tHead.rows[0].cells].forEach((head, place) => {
      if (!head.textContent) return;
      const button = made("button", head.textContent, "");
      button.type = "button";
      button.onclick = () => sort(table, place);
      head.replaceChildren(button);
      head.ariaSort = "none";
    });
    const button = made("button", "Copy as Markdown", "copy");
    button.type = "button";
    button.onclick = async () => {
      await copy(markdown(table));
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy as Markdown"; }, 1500);
    };
    table.closest(".table").append(button);
  }

  const still = () => {
    for (const box of every(document, ".scroll")) box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;
  };
  addEventListener("resize", still);
  still();

  // Values: of the point or bar next to the mouse or finger, and by the arrow keys.
  const tip = document.body.appendChild(made("div", "", "tip"));
  tip.hidden = true;
  tip.setAttribute("role", "status");
  function show(one) {
    tip.hidden = !one;
    if (!one) return;
    tip.textContent = one.told;
    const box = one.getBoundingClientRect(), wide = document.documentElement.clientWidth;
    const left = Math.min(Math.max(8, box.x + box.width / 2 - tip.offsetWidth / 2), wide - tip.offsetWidth - 8);
    const above = box.y - tip.offsetHeight - 8;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(one.matches(".bin") ? Math.max(above, box.y) : above < 0 ? box.bottom + 8 : above) + scrollY}px`;
  }
  for (const chart of every(document, ".chart")) {
    const drawing = chart.querySelector(".drawing svg"), points = every(drawing, "circle, .bin");
    for (const one of points) {
      one.told = one.querySelector("title").textContent;
      one.querySelector("title").remove(); // or both would show
    }
    const seen = () => points.filter((one) => !one.closest(".off"));
    const near = (lines) => {
      chart.classList.toggle("chosen", lines.length > 0);
      for (const line of every(drawing, "g.line")) line.classList.toggle("near", lines.includes(line));
    };
    const nearest = ({ clientX, clientY }) => {
      let best = null, least = 40;
      for (const one of seen()) {
        const box = one.getBoundingClientRect();
        const high = one.matches(".bin") ? 0 : clientY - box.y - box.height / 2;
        const far = Math.hypot(clientX - box.x - box.width / 2, high);
        if (far < least) [best, least] = [one, far];
      }
      return best;
    };
    const pick = (one) => { show(one); near(one?.closest("g.line") ? [one.closest("g.line")] : []); };
    drawing.addEventListener("pointermove", (event) => pick(nearest(event)));
    drawing.addEventListener("pointerdown", (event) => pick(nearest(event)));
    drawing.addEventListener("pointerleave", () => pick(null));
    drawing.addEventListener("blur", () => pick(null));
    drawing.tabIndex = 0;
    drawing.ariaDescription = "Arrow keys tell the values.";
    let at = -1;
    drawing.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], now = seen();
      if (event.key === "Escape") pick(null);
      if (!step || !now.length) return;
      event.preventDefault();
      at = (at + step + now.length) % now.length;
      pick(now[at]);
    });
    const lines = every(drawing, "g.line");
    for (const one of every(chart, ".legend li")) {
      one.addEventListener("pointerenter", () => near([lines[one.dataset.line]]));
      one.addEventListener("pointerleave", () => near([]));
    }
  }
  addEventListener("beforeprint", () => { for (const one of every(document, "details")) one.open = true; });
});
