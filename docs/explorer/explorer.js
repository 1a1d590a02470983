// SPDX-License-Identifier: Apache-2.0
// The page of the explorer: a form, and the plan that it describes.
"use strict";

(() => {
  const { makePlan, ownerOf } = globalThis.cpattnPlan;
  const { FIELDS, readAll, fromAddress, toAddress, shown } = globalThis.cpattnFields;
  const COLOURS = 8; // of ranks, then they begin again; see explorer.css
  const DRAWN_SEQUENCES = 16;
  const DRAWN_TOKENS = 64; // of a sequence, one by one
  const LISTED_ROWS = 512;
  const EXAMPLES = {
    "One prompt with a cached prefix": { extend: "24", prefix: "8", ranks: "4" },
    "Long and short prompts": { extend: "8192, 900, 77", prefix: "4096, 0, 512", ranks: "8" },
    "Too short to split": { extend: "7, 5", prefix: "100, 0", ranks: "4" },
  };

  // An element with attributes and children; what is no element becomes its text.
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat());
    return element;
  }

  const share = (value, mean) => `${(mean ? value / mean : 1).toFixed(2)} ×`;
  const plural = (count, noun) => `${shown(count)} ${noun}${count === 1 ? "" : "s"}`;
  const span = ({ begin, end }) =>
    end === begin ? "none" : end === begin + 1 ? `${begin}` : `${begin}–${end - 1}`;

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    let value = count;
    while (value >= 1024 && unit < units.length - 1) {
      value /= 1024;
      unit += 1;
    }
    return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
  }

  // --- the form --------------------------------------------------------------------------------

  function control(name) {
    const field = FIELDS[name];
    const about = { id: `cpx-${name}`, name, "aria-describedby": `cpx-${name}-hint cpx-${name}-error` };
    const input = field.choices
      ? make("select", about, field.choices.map((choice) => make("option", { value: choice }, choice)))
      : make("input", {
          ...about, type: "text", autocomplete: "off", spellcheck: "false",
          inputmode: ["extend", "prefix"].includes(name) ? "text" : "numeric",
        });
    return make(
      "div",
      { class: `cpx-field cpx-field-${name}` },
      make("label", { for: about.id }, field.label),
      input,
      make("p", { class: "cpx-hint", id: `cpx-${name}-hint` }, field.hint ?? ""),
      make("p", { class: "cpx-error", id: `cpx-${name}-error`, role: "alert" }),
    );
  }

  function makeForm() {
    const names = Object.keys(FIELDS);
    const group = (legend, members) =>
      make("fieldset", {}, make("legend", {}, legend), members.map(control));
    const buttons = Object.keys(EXAMPLES).map((name) =>
      make("button", { type: "button", "data-example": name }, name),
    );
    return make(
      "form",
      { class: "cpx-form", "aria-label": "The batch and its ranks", novalidate: "" },
      group("Batch", names.slice(0, 4)),
      group("Sizes, for bytes", names.slice(4)),
      make("div", { class: "cpx-examples", role: "group", "aria-label": "Examples" }, "Examples:", buttons),
    );
  }

  // --- the plan --------------------------------------------------------------------------------

  function runsInWords(plan, sequence) {
    if (!sequence.blocks) return "its tokens go to the ranks in turn";
    const ranks = plan.perRank.slice(0, COLOURS).map(({ rank }) => {
      const own = sequence.blocks.filter((block) => block.rank === rank && block.end > block.begin);
      return `rank ${rank} has ${own.map(span).join(" and ") || "none"}`;
    });
    return ranks.join(", ") + (plan.ranks > COLOURS ? ", and so on" : "");
  }

  function bar(plan, sequence, index, longest) {
    const piece = (size, rank) =>
      make(
        "span",
        { class: `cpx-block cpx-r${rank % COLOURS}`, style: `flex: ${size} 0 0` },
        make("span", { class: "cpx-name" }, `${rank}`),
      );
    const title = `Sequence ${index}: ${plural(sequence.length, "new token")}, ${shown(sequence.prefix)} cached`;
    const pieces = sequence.prefix
      ? [make("span", { class: "cpx-block cpx-cached", style: `flex: ${sequence.prefix} 0 0` })]
      : [];
    let note = "";
    if (sequence.blocks) {
      const blocks = sequence.blocks.filter((block) => block.end > block.begin);
      pieces.push(...blocks.map((block) => piece(block.end - block.begin, block.rank)));
    } else if (sequence.length <= DRAWN_TOKENS) {
      for (let t = 0; t < sequence.length; t += 1) pieces.push(piece(1, ownerOf(sequence, t, plan.ranks)));
    } else {
      pieces.push(make("span", { class: "cpx-block cpx-turns", style: `flex: ${sequence.length} 0 0` }));
      const index = sequence.offset ? `(t + ${sequence.offset})` : "t";
      note = ` – token t belongs to rank ${index} mod ${plan.ranks}`;
    }
    const width = (100 * (sequence.prefix + sequence.length)) / longest;
    return make(
      "div",
      { class: "cpx-sequence" },
      make("p", {}, title + note),
      make(
        "div",
        { class: "cpx-bar", role: "img", "aria-label": `${title}; ${runsInWords(plan, sequence)}.`, style: `width: ${width}%` },
        pieces,
      ),
    );
  }

  function table(caption, header, rows) {
    const cell = (value, i) =>
      i === 0 ? make("th", { scope: "row" }, value) : make("td", {}, value);
    return make(
      "div",
      { class: "cpx-scroll", role: "region", tabindex: "0", "aria-label": caption },
      make(
        "table",
        {},
        make("caption", {}, caption),
        make("thead", {}, make("tr", {}, header.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell)))),
      ),
    );
  }

  function rankTable(plan) {
    const most = Math.max(1, ...plan.perRank.map((each) => each.pairs));
    const rows = plan.perRank.map((each) => [
      `${each.rank}`,
      shown(each.tokens),
      shown(each.pairs),
      make(
        "span",
        { class: "cpx-load" },
        make("span", { class: "cpx-number" }, share(each.pairs, plan.meanPairs)),
        make("span", {
          class: `cpx-weight cpx-r${each.rank % COLOURS}`, "aria-hidden": "true",
          style: `width: ${(6 * each.pairs) / most}em`,
        }),
      ),
      bytes(each.sentBytes),
      bytes(each.receivedBytes),
    ]);
    const header = ["Rank", "New tokens", "Pairs", "Pairs over the mean", "Sends", "Receives"];
    return table("What each rank has to do, in one layer", header, rows);
  }

  function blockTable(plan, open) {
    const interleave = plan.strategy === "interleave";
    const header = interleave
      ? ["Sequence", "Rank", "Queries"]
      : ["Sequence", "Rank", "prev tokens", "kv_len_prev"];
    if (plan.strategy === "zigzag") header.push("next tokens", "kv_len_next");
    const rows = [];
    for (const [s, sequence] of plan.sequences.entries()) {
      for (const each of plan.perRank) {
        if (rows.length === LISTED_ROWS) break;
        const cells = [`${s}`, `${each.rank}`];
        if (interleave) cells.push(shown(each.queries[s]));
        for (const half of interleave ? [] : ["prev", "next"]) {
          const own = sequence.blocks.find((x) => x.rank === each.rank && x.half === half);
          if (own) cells.push(span(own), shown(each[`${half}Keys`][s]));
        }
        rows.push(cells);
      }
    }
    const count = plan.sequences.length * plan.ranks;
    const caption = count > rows.length ? `Blocks: the first ${rows.length} of ${shown(count)}` : "Blocks";
    return make(
      "details",
      { open: open ? "" : undefined },
      make("summary", {}, "Blocks of each rank, and the keys that they see"),
      table(caption, header, rows),
    );
  }

  const RULES = {
    zigzag: "at least two ranks, and two tokens for each rank in every sequence",
    interleave: "at least two ranks, and a token for each of them in the batch",
    contiguous: "at least two ranks, and a token for each of them in every sequence",
  };

  function facts(plan) {
    const most = Math.max(...plan.perRank.map((each) => each.pairs));
    const busiest = plan.perRank.find((each) => each.pairs === most);
    const exchanged = plan.perRank.reduce((total, each) => total + each.sentBytes, 0);
    const pairs = [
      ["Imbalance", `${share(plan.imbalance, 1)} the mean: rank ${busiest.rank} has the most pairs`],
      ["Bytes exchanged", `${bytes(exchanged)} in one layer: each rank sends its keys and values to all others`],
      ["Pages", `${plural(plan.pages, "page")}, ${bytes(plan.pageBytes)} in one layer, on every rank`],
      ["Rows of a rank, padded", shown(plan.paddedRows)],
      [
        "Would an engine split it?",
        plan.applies ? "yes" : `no: ${plan.strategy} takes ${RULES[plan.strategy]}`,
      ],
    ];
    return make(
      "dl",
      { class: "cpx-facts" },
      pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    );
  }

  function code(plan) {
    const sums = plan.extend.map((length, s) => length + plan.prefix[s]);
    const command =
      `cpattn explain --lens ${plan.extend.join(",")} --prefix ${plan.prefix.join(",")} ` +
      `--cp-size ${plan.ranks} --strategy ${plan.strategy}`;
    const python =
      `cpattn.build_cp_metadata_all_ranks(\n    [${plan.extend.join(", ")}], [${sums.join(", ")}], ` +
      `cp_size=${plan.ranks}, strategy="${plan.strategy}"\n)`;
    // No <pre>: the site would hang a button to copy it there, which does not know that it changes.
    const block = (label, text) =>
      make("div", { class: "cpx-code", tabindex: "0", role: "group", "aria-label": label }, make("code", {}, text));
    return [block("The same plan on the command line", command), block("The same plan in Python", python)];
  }

  function showPlan(plan, link, open) {
    const longest = Math.max(1, ...plan.sequences.map((each) => each.prefix + each.length));
    const drawn = plan.sequences.slice(0, DRAWN_SEQUENCES);
    const hidden = plan.sequences.length - drawn.length;
    return [
      make("h2", {}, "Who owns which tokens"),
      make("p", { class: "cpx-legend" }, make("span", { class: "cpx-key cpx-cached" }), "cached; numbers are ranks"),
      ...drawn.map((sequence, s) => bar(plan, sequence, s, longest)),
      make("p", {}, hidden ? `and ${plural(hidden, "sequence")} more` : ""),
      make("h2", {}, "Work and bytes"),
      facts(plan),
      rankTable(plan),
      make("p", { class: "cpx-hint" }, "A pair is a query and a key that it sees, in one head."),
      blockTable(plan, open),
      make("h2", {}, "Take it with you"),
      make("p", {}, make("a", { href: link, class: "cpx-link" }, "Link to this plan")),
      ...code(plan),
    ];
  }

  // --- the page --------------------------------------------------------------------------------

  function start(root) {
    const form = makeForm();
    const status = make("p", { class: "cpx-status", role: "status" });
    const result = make("div", { class: "cpx-result" });
    const odd = {}; // what an address gave for a choice that is none, until another is made
    root.replaceChildren(form, status, result);
    root.classList.add("cpx");

    const texts = () =>
      Object.fromEntries(Object.keys(FIELDS).map((name) => [name, odd[name] ?? form.elements[name].value]));

    function fill(values) {
      for (const [name, field] of Object.entries(FIELDS)) {
        const text = values[name] ?? field.start;
        const isOdd = field.choices && !field.choices.includes(text);
        form.elements[name].value = isOdd ? field.start : text;
        delete odd[name];
        if (isOdd) odd[name] = text;
      }
    }

    function update({ remember = true } = {}) {
      const given = texts();
      const { batch, errors } = readAll(given);
      for (const name of Object.keys(FIELDS)) {
        form.elements[name].removeAttribute("aria-invalid");
        if (errors[name]) form.elements[name].setAttribute("aria-invalid", "true");
        const note = document.getElementById(`cpx-${name}-error`);
        if (note.textContent !== (errors[name] ?? "")) note.textContent = errors[name] ?? "";
      }
      const broken = Object.keys(errors).length;
      result.hidden = broken > 0;
      if (broken) {
        status.textContent = `No plan: ${plural(broken, "field")} to correct.`;
        return;
      }
      const plan = makePlan(batch);
      const link = toAddress(given);
      const open = result.querySelector("details")?.open;
      result.replaceChildren(...showPlan(plan, link, open));
      status.textContent =
        `${plan.strategy} over ${plural(plan.ranks, "rank")}: ${plural(plan.extend.length, "sequence")}, ` +
        `${plural(plan.numTokens, "new token")}. The busiest rank has ${share(plan.imbalance, 1)} the mean work.`;
      if (remember) history.replaceState(null, "", link);
    }

    form.addEventListener("input", (event) => {
      delete odd[event.target.name];
      update();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("click", (event) => {
      const example = EXAMPLES[event.target.dataset.example];
      if (!example) return;
      fill({ ...texts(), ...example });
      update();
    });
    addEventListener("hashchange", () => {
      const values = fromAddress(location.hash);
      if (!values || location.hash === toAddress(texts())) return; // the focus stays where it is
      fill(values);
      update({ remember: false });
    });
    fill(fromAddress(location.hash) ?? {});
    update({ remember: false });
  }

  const root = document.getElementById("cpattn-explorer");
  if (root) start(root);
})();
