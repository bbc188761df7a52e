for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor"), output = figure.querySelector("output");
  const nearest = (steps, x) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; steps[middle] > x ? high = middle : low = middle; }
    return x - steps[low] <= steps[high] - x ? low : high;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), span = chart.high - chart.low;
    const x = chart.low + Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * span;
    const hits = chart.lines.map(line => {
      const index = nearest(line.x, x);
      return {step: line.x[index], text: (line.label + " " + line.text[index]).trim()};
    });
    const step = hits.reduce((a, b) => Math.abs(b.step - x) < Math.abs(a.step - x) ? b : a).step;
    const shown = hits.filter(hit => Math.abs(hit.step - step) <= span / 50);
    const at = (step - chart.low) / span * 100 + "%";
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
    output.textContent = "step " + step.toLocaleString("en") + " · " + shown.map(hit => hit.text).join(" · ");
    figure.classList.add("reading");
  });
  svg.addEventListener("pointerleave", () => figure.classList.remove("reading"));
}
