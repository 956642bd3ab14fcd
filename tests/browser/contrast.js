// Contrast of every visible text of the page with what is behind it (WCAG 2.2, 1.4.3; marks without a letter are decoration): one line for each pair of colours below 4.5, or 3 for large text.
() => {
  const parse = c => {
    let m = c.match(/^rgba?\(([^)]+)\)/);
    if (m) { const v = m[1].split(/[\s,\/]+/).map(Number); return [v[0], v[1], v[2], v[3] ?? 1]; }
    m = c.match(/^color\(srgb ([^)]+)\)/);
    if (m) { const v = m[1].split(/[\s\/]+/).map(Number); return [255 * v[0], 255 * v[1], 255 * v[2], v[3] ?? 1]; }
    return [0, 0, 0, 0];
  };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const paper = matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0, 1] : [255, 255, 255, 1];
  const behind = e => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const s = getComputedStyle(e), c = parse(s.backgroundColor);
      if (s.backgroundImage !== "none") return null;              // a picture: not for arithmetic
      if (c[3] > 0) layers.push(c);
      if (c[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), paper);
  };
  const found = new Map(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = walker.nextNode(); n; n = walker.nextNode()) {
    const e = n.parentElement, text = n.data.trim();
    if (!/[\p{L}\p{N}]/u.test(text) || e.closest("script, style, noscript, svg, select, [aria-hidden=true], mjx-container") || !e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const s = getComputedStyle(e), under = behind(e);
    if (!under || !e.getClientRects().length) continue;
    let faint = 1; for (let p = e; p; p = p.parentElement) faint *= +getComputedStyle(p).opacity;
    const c = parse(s.color); c[3] *= faint;
    const size = parseFloat(s.fontSize), large = size >= 24 || (size >= 18.66 && +s.fontWeight >= 700), r = ratio(over(c, under), under);
    if (r < (large ? 3 : 4.5) - .01) {
      const key = `${e.tagName.toLowerCase()}.${e.className} ${s.color} on ${under.slice(0, 3).map(Math.round)}`;
      if (!found.has(key)) found.set(key, `${r.toFixed(2)} ${key}: ${text.slice(0, 40)}`);
    }
  }
  return [...found.values()];
}
