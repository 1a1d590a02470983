// SPDX-License-Identifier: Apache-2.0
// What is wrong with the words of an SVG picture: where one leaves the picture or its box, lies on
// another or on a hatching, or has little contrast with what is painted last below its middle.
() => {
  const channel = (byte) => {
    const x = byte / 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/\d+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const fill = (element) => getComputedStyle(element).fill;
  const page = document.querySelector("rect.page").getBoundingClientRect();
  const within = (a, b) =>
    a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 2 && a.bottom < b.bottom + 2;
  const holds = (a, x, y) => a.left <= x && x <= a.right && a.top <= y && y <= a.bottom;
  const shapes = [...document.querySelectorAll("rect, path, text")];
  const painted = shapes.filter((e) => !e.closest("defs"));
  const texts = painted.filter((e) => e.tagName === "text");
  return texts.flatMap((text) => {
    const box = text.getBoundingClientRect();
    const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    const before = painted.slice(0, painted.indexOf(text)).filter((e) => e.tagName !== "text");
    const filled = before.filter((e) => fill(e) !== "none");
    const under = filled.filter((e) => holds(e.getBoundingClientRect(), x, y)).at(-1);
    const said = [];
    if (!within(box, page)) said.push("leaves the picture");
    if (!within(box, under.getBoundingClientRect())) said.push("leaves its box");
    if (!fill(under).startsWith("rgb")) return [`${text.textContent}: lies on ${fill(under)}`];
    const [a, b] = [luminance(fill(text)), luminance(fill(under))].sort((p, q) => q - p);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) said.push(`contrast ${contrast}`);
    for (const other of texts) {
      const o = other.getBoundingClientRect();
      const beside = o.left >= box.right || o.right <= box.left;
      const apart = beside || o.top + 3 >= box.bottom || o.bottom <= box.top + 3;
      if (other !== text && !apart) said.push(`covers ${other.textContent}`);
    }
    return said.map((what) => `${text.textContent}: ${what}`);
  });
}
