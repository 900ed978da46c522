// Contrast of every piece of text with the nearest background behind it, WCAG 2.2's relative luminance.
const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
const light = (rgb) => {
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = rgb.slice(0, 3).map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const rgba = numbers(getComputedStyle(element).backgroundColor);
    if (rgba.length < 4 || rgba[3] > 0) return rgba;
  }
  return [255, 255, 255];
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
while (texts.nextNode()) {
  if (!texts.currentNode.textContent.trim()) continue;
  const element = texts.currentNode.parentElement;
  const [a, b] = [numbers(getComputedStyle(element).color), behind(element)].map(light);
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), texts.currentNode.textContent.trim()]);
}
return found;
