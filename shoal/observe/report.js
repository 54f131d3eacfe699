for (const chart of document.querySelectorAll('svg.chart')) {
  const series = JSON.parse(chart.dataset.series), pointer = chart.querySelector('.pointer');
  const make = (tag, attributes, text) => {
    const node = document.createElementNS(chart.namespaceURI, tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    pointer.append(node);
    return node;
  };
  chart.addEventListener('pointerleave', () => pointer.replaceChildren());
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect(), view = chart.viewBox.baseVal;
    const x = (event.clientX - box.left) * view.width / box.width;
    pointer.replaceChildren();
    const near = series.filter(line => line.points.length).map(line => ({
      line, point: line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)}));
    if (!near.length) return;
    const lead = near[0].point;
    make('line', {x1: lead[0], x2: lead[0], y1: 12, y2: view.height - 28});
    const rows = ['step ' + lead[2].toLocaleString('en')].concat(
      near.map(n => n.line.name + ' ' + n.point[3] + (n.point[2] === lead[2] ? '' : ' at ' + n.point[2])));
    const left = lead[0] > view.width / 2, panel = make('rect', {y: 14, rx: 5, height: rows.length * 17 + 10});
    const texts = rows.map((row, i) => make('text', {y: 31 + 17 * i}, row));
    const width = Math.max(...texts.map(t => t.getComputedTextLength())) + 18;
    const start = left ? lead[0] - width - 8 : lead[0] + 8;
    panel.setAttribute('x', start); panel.setAttribute('width', width);
    texts.forEach(t => t.setAttribute('x', start + 9));
    for (const n of near) make('circle', {cx: n.point[0], cy: n.point[1], r: 4, fill: `var(--${n.line.color})`});
  });
}
