// A table that scrolls sideways can be reached and scrolled by keys.
const reach = () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const scrolls = table.scrollWidth > table.clientWidth;
    if (scrolls === table.hasAttribute("tabindex")) continue;
    if (scrolls) {
      table.setAttribute("tabindex", "0");
      table.setAttribute("role", "group");
      table.setAttribute("aria-label", "Table");
    } else {
      ["tabindex", "role", "aria-label"].forEach((name) => table.removeAttribute(name));
    }
  }
};
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", reach);
addEventListener("load", reach);
