(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("torchmedic-data").textContent);
  var status = document.getElementById("status");

  function copied(button, ok) {
    var before = "Copy patch";
    button.textContent = ok ? "Copied" : "Not copied";
    status.textContent = ok ? "The patch was copied." : "The patch could not be copied.";
    setTimeout(function () { button.textContent = before; status.textContent = ""; }, 2000);
  }

  function copyOldWay(text) {
    var area = document.createElement("textarea");
    area.value = text;
    area.className = "sr";
    document.body.appendChild(area);
    area.select();
    var ok = false;
    try { ok = document.execCommand("copy"); } catch (error) { ok = false; }
    area.remove();
    return ok;
  }

  document.querySelectorAll("button.copy").forEach(function (button) {
    var finding = data.report.diagnoses[Number(button.dataset.finding)];
    var text = finding.treatments[Number(button.dataset.cure)].patch;
    button.hidden = false;
    button.addEventListener("click", function () {
      if (navigator.clipboard && window.isSecureContext) {
        navigator.clipboard.writeText(text).then(
          function () { copied(button, true); },
          function () { copied(button, copyOldWay(text)); button.focus(); });
      } else {
        copied(button, copyOldWay(text));
        button.focus();
      }
    });
  });

  if (typeof uPlot === "undefined") { return; }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function size(value) {
    if (value === null || value === undefined) { return "–"; }
    var units = ["B", "KiB", "MiB", "GiB", "TiB"], number = 0;
    while (value >= 1024 && number < 4) { value /= 1024; number += 1; }
    return (value >= 100 || number === 0 ? value.toFixed(0) : value.toFixed(1)) + " " + units[number];
  }

  // Marks are drawn above the curves, as vertical lines.
  function marks(curve) {
    return {hooks: {draw: [function (plot) {
      var pen = plot.ctx;
      pen.save();
      pen.strokeStyle = colour("--error");
      pen.lineWidth = 2 * devicePixelRatio;
      curve.marks.forEach(function (mark, row) {
        var x = plot.valToPos(mark.x, "x", true);
        if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) { return; }
        pen.beginPath();
        pen.moveTo(x, plot.bbox.top);
        pen.lineTo(x, plot.bbox.top + plot.bbox.height);
        pen.stroke();
        var left = x > plot.bbox.left + plot.bbox.width / 2;
        pen.font = "600 " + 13 * devicePixelRatio + "px system-ui, sans-serif";
        pen.textAlign = left ? "right" : "left";
        pen.textBaseline = "top";
        var at = x + (left ? -6 : 6) * devicePixelRatio, top = plot.bbox.top + (2 + 16 * row) * devicePixelRatio;
        var wide = pen.measureText(mark.text).width + 4 * devicePixelRatio;
        pen.fillStyle = colour("--bg");
        pen.fillRect(left ? at - wide : at - 2 * devicePixelRatio, top - devicePixelRatio, wide + 2 * devicePixelRatio, 16 * devicePixelRatio);
        pen.fillStyle = colour("--error");
        pen.fillText(mark.text, at, top);
      });
      pen.restore();
    }]}};
  }

  // Labels of bytes stand at powers of two from each other.
  var steps = [];
  for (var power = -20; power < 60; power += 1) { steps.push(Math.pow(2, power)); }

  // Labels of a logarithmic axis: at most six powers of ten.
  function decades(plot, number, low, high) {
    var first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), found = [];
    for (var at = first; at <= last; at += Math.ceil((last - first + 1) / 6)) { found.push(Math.pow(10, at)); }
    return found;
  }

  var drawn = [];

  function draw(curve, number) {
    var figure = document.getElementById("curve-" + number);
    var live = figure.querySelector(".live");
    live.textContent = "";
    live.hidden = false;
    figure.classList.add("is-live");
    figure.querySelector(".only-live").hidden = false;
    var shown = curve.unit === "bytes" ? size : function (value) { return value === null ? "–" : Math.abs(value) >= 1e5 ? value.toExponential() : String(Number(value.toPrecision(4))); };
    var along = function (value) { return curve.x_unit === "s" ? value + " s" : String(value); };
    var axis = {stroke: colour("--muted"), grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line"), width: 1}};
    var last = curve.marks.reduce(function (most, mark) { return Math.max(most, mark.x); }, curve.x[curve.x.length - 1]);
    var series = [{label: curve.x_name, value: function (plot, value) { return value === null ? "–" : along(Number(value.toFixed(1))); }}];
    var vertical = {
      zero: {range: function (plot, low, high) { return [0, (high || 1) * 1.15]; }},
      fit: {range: function (plot, low, high) { var pad = (high - low) * 0.08 || Math.abs(high) * 0.5 || 1; return [low - pad, high + pad]; }},
      log: {distr: 3, log: 10}
    };
    var labels = {size: 78, values: function (plot, values) { return values.map(function (value) { return value === null ? "" : shown(value); }); }};
    if (curve.unit === "bytes") { labels.incrs = steps; }
    if (curve.scale === "log") { labels.splits = decades; }
    curve.lines.forEach(function (line, index) {
      series.push({label: line.name, stroke: colour("--k" + index % 8), width: 2, spanGaps: true, points: {show: false},
                   value: function (plot, value) { return shown(value); }});
    });
    var plot = new uPlot({
      width: live.clientWidth || 300, height: 220, plugins: [marks(curve)], series: series,
      legend: {live: true}, cursor: {drag: {x: true, y: false}},
      scales: {x: {time: false, range: function (plot, low, high) {
        return low === curve.x[0] && high === curve.x[curve.x.length - 1] ? [low, last] : [low, high];
      }}, y: vertical[curve.scale]},
      axes: [
        Object.assign({values: function (plot, values) { return values.map(along); }}, axis),
        Object.assign(labels, axis)
      ]
    }, [curve.x].concat(curve.lines.map(function (line) { return line.values; })), live);
    drawn.push([plot, live]);
  }

  function drawAll() {
    drawn.forEach(function (each) { each[0].destroy(); });
    drawn = [];
    data.curves.forEach(draw);
  }

  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("resize", function () {
    drawn.forEach(function (each) { each[0].setSize({width: each[1].clientWidth, height: 220}); });
  });
})();
