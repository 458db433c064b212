"use strict";
// What is in the file is text: it reaches the page through textContent and the canvas only.
const film = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const ROW = 24, GAP = 8, LABEL = 96;
let frame = film.frames.length - 1;
let playing = 0;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (count >= 1024 && units.length > 1) { count /= 1024; units.shift(); }
  return `${Number.isInteger(count) ? count : count.toFixed(1)} ${units[0]}`;
}

function seconds(count) {
  return Math.abs(count) < 1 ? `${(count * 1e3).toFixed(0)} ms` : `${count.toFixed(2)} s`;
}

const hex = (count) => `0x${count.toString(16)}`;
const there = (thing, at) => thing.from <= at && (thing.to === null || thing.to > at);
// What blocks of a group have in common, as in growth.py.
const growing = new Set(film.growing.map((group) => JSON.stringify(group.key)));
for (const block of film.blocks) {
  block.place = block.site === null ? [] : film.sites[block.site];
  block.key = JSON.stringify([block.device, block.place, block.site === null ? block.size : 0]);
  block.grows = growing.has(block.key);
}

// The map of one device: the address axis, broken into rows like text.
// Who else reaches a segment.
const reached = (segment) => (segment.registered ? ", registered" : "") + (segment.multicast ? ", multicast" : "");

class DeviceMap {
  constructor(device, parent) {
    this.device = device;
    this.segments = film.segments.filter((segment) => segment.device === device.device);
    this.blocks = film.blocks.filter((block) => block.device === device.device);
    this.extent = Math.max(device.granule, ...this.segments.map((each) => each.offset + each.size));
    this.rowBytes = device.granule;
    while (this.rowBytes * 12 < this.extent) this.rowBytes *= 2;
    parent.append(element("h2", `Device ${device.device}`));
    this.cards = parent.appendChild(element("div", undefined, "cards"));
    const bar = parent.appendChild(element("div", undefined, "bar"));
    this.scale = bar.appendChild(element("span"));
    const zoom = bar.appendChild(element("span"));
    for (const [text, name, factor] of [["−", "wider rows", 2], ["+", "narrower rows", 0.5]]) {
      const button = zoom.appendChild(element("button", text));
      button.setAttribute("aria-label", name);
      button.addEventListener("click", () => this.zoom(factor));
    }
    this.canvas = parent.appendChild(element("canvas"));
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => { byId("tip").hidden = true; });
    const table = parent.appendChild(element("table"));
    const head = table.appendChild(element("thead")).appendChild(element("tr"));
    for (const [name, kind] of [["bytes", "n"], ["blocks", "n"], ["each", "n"], ["oldest", "n"],
      ["array"], ["held by", ""], ["from"]]) head.append(element("th", name, kind));
    this.body = table.appendChild(element("tbody"));
  }

  zoom(factor) {
    const wanted = this.rowBytes * factor;
    if (wanted < this.device.granule / 64 || this.extent / wanted > 400) return;
    this.rowBytes = wanted;
    this.draw();
  }

  draw() {
    const at = film.frames[frame].at;
    const figures = film.frames[frame].devices.find((each) => each.device === this.device.device);
    this.hits = [];
    this.showCards(figures);
    const rows = Math.max(1, Math.ceil(this.extent / this.rowBytes));
    this.scale.textContent = `addresses from ${hex(this.device.base)}, ${bytes(this.rowBytes)} a row`;
    const width = this.canvas.clientWidth, height = rows * (ROW + GAP), ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px ui-monospace, monospace";
    pen.textBaseline = "middle";
    for (let row = 0; row < rows; row++) {
      pen.fillStyle = colour("faint");
      pen.fillText(`+${hex(row * this.rowBytes)}`, 0, row * (ROW + GAP) + ROW / 2);
      pen.strokeStyle = colour("line");
      pen.setLineDash([2, 3]);
      pen.strokeRect(LABEL + 0.5, row * (ROW + GAP) + 0.5, width - LABEL - 1, ROW - 1);
    }
    pen.setLineDash([]);
    const segments = this.segments.filter((each) => there(each, at));
    const captured = segments.filter((each) => each.capture !== null);
    const blocks = this.blocks.filter((each) => there(each, at));
    for (const segment of segments) this.fill(pen, segment, colour("free"), 0, ROW, segment);
    for (const block of blocks) {
      const graph = captured.find((each) => block.offset >= each.offset && block.offset < each.offset + each.size);
      const state = graph ? "capture" : block.grows ? "grows" : "used";
      this.fill(pen, block, colour(state), 0, ROW, block, state);
    }
    for (const segment of segments) {
      if (segment.multicast) this.fill(pen, segment, colour("multicast"), 0, 7);
      if (segment.registered) this.fill(pen, segment, colour("registered"), 0, 4);
      this.outline(pen, segment);
    }
    this.showGroups(blocks, at);
  }

  // The parts of a run of bytes, one for each row it reaches into: x, y, width.
  *parts(run) {
    const scale = (this.canvas.clientWidth - LABEL) / this.rowBytes;
    for (let start = run.offset; start < run.offset + run.size;) {
      const row = Math.floor(start / this.rowBytes);
      const end = Math.min(run.offset + run.size, (row + 1) * this.rowBytes);
      yield [LABEL + (start - row * this.rowBytes) * scale, row * (ROW + GAP), (end - start) * scale];
      start = end;
    }
  }

  fill(pen, run, style, top, height, hit, state) {
    pen.fillStyle = style;
    for (const [x, y, width] of this.parts(run)) {
      const seam = hit && state && width > 3 ? 1 : 0;  // between neighbours
      pen.fillRect(x, y + top, Math.max(width - seam, 0.5), height);
      if (hit) this.hits.push({ x, y, width, thing: hit, state });
    }
  }

  outline(pen, segment) {
    pen.strokeStyle = colour("ink");
    for (const [x, y, width] of this.parts(segment)) pen.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 0), ROW - 1);
  }

  showCards(figures) {
    const values = figures ? [
      ["in use", bytes(figures.used_bytes)], ["free", bytes(figures.free_bytes)],
      ["held", bytes(figures.total_bytes)], ["peak in use", bytes(figures.peak_used_bytes)],
      ["largest hole", bytes(figures.largest_hole)],
      ["fragmentation", `${(figures.fragmentation * 100).toFixed(0)} %`],
      ["of CUDA graphs", bytes(figures.leased_bytes)],
      ["segments", figures.segments], ["blocks in use", figures.used_blocks],
    ] : [];
    this.cards.replaceChildren(...values.map(([name, value]) => {
      const card = element("div", undefined, "card");
      card.append(element("b", String(value)), element("span", name));
      return card;
    }));
  }

  showGroups(blocks, at) {
    const groups = new Map();
    for (const block of blocks) {
      if (!groups.has(block.key)) groups.set(block.key, []);
      groups.get(block.key).push(block);
    }
    const total = (group) => group.reduce((sum, block) => sum + block.size, 0);
    const sorted = [...groups.values()].sort((a, b) => total(b) - total(a)).slice(0, 15);
    this.body.replaceChildren(...sorted.map((group) => {
      const row = element("tr", undefined, group[0].grows ? "grows" : "");
      const array = group.flatMap((block) => block.arrays || [])[0];
      const sizes = group.map((block) => block.size);
      const ends = [...new Set([Math.min(...sizes), Math.max(...sizes)])].map(bytes).join(" to ");
      const oldest = at - Math.min(...group.map((block) => block.from));
      row.append(element("td", bytes(total(group)), "n"), element("td", String(group.length), "n"),
        element("td", ends, "n"), element("td", seconds(oldest), "n"),
        element("td", array ? `${array.dtype} (${array.shape.join(", ")})` : "-"),
        element("td", (array && array.held_by || "-").replace(/\[\d+\]/g, "[*]")),
        element("td", group[0].place[0] || "-"));
      return row;
    }));
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const hit = this.hits.findLast((each) => x >= each.x && x < each.x + each.width && y >= each.y && y < each.y + ROW);
    const tip = byId("tip");
    tip.hidden = !hit;
    if (!hit) return;
    tip.textContent = this.describe(hit).join("\n");
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  }

  describe({ thing, state }) {
    const at = film.frames[frame].at, address = hex(this.device.base + thing.offset);
    const owner = this.segments.find((each) => there(each, at) && thing.offset >= each.offset && thing.offset < each.offset + each.size);
    const whose = owner.capture !== null ? `CUDA graph, capture ${owner.capture}` : `stream ${owner.stream}`;
    if (!state) {
      return [`free, in a segment of ${bytes(thing.size)}`, `offset ${hex(thing.offset)}, address ${address}`, whose,
        `generation ${thing.generation}${reached(thing)}, ${seconds(at - thing.from)} old`];
    }
    const lines = [`${state === "capture" ? "in use by a CUDA graph" : "in use"}: ${bytes(thing.size)}`,
      `offset ${hex(thing.offset)}, address ${address}`, `${whose}${reached(owner)}`,
      `${seconds(at - thing.from)} old${thing.to === null ? ", there at the end" : `, given back after ${seconds(thing.to - thing.from)}`}`];
    for (const array of thing.arrays || []) {
      lines.push(`${array.dtype} (${array.shape.join(", ")})${array.held_by ? `, held by ${array.held_by}` : ""}`);
    }
    return lines.concat(thing.place.slice(0, 4).map((each) => `at ${each}`));
  }
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// All devices together: bytes held and in use over time.
function drawChart() {
  const chart = byId("chart"), width = chart.clientWidth, height = chart.clientHeight, last = film.frames.at(-1).at || 1;
  const sum = (each, name) => each.devices.reduce((total, device) => total + device[name], 0);
  const most = Math.max(1, ...film.frames.map((each) => sum(each, "total_bytes")));
  const x = (at) => (at / last) * width, y = (value) => height - (value / most) * (height - 18);
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.replaceChildren();
  for (const [name, style] of [["total_bytes", "free"], ["used_bytes", "used"]]) {
    let path = `M0 ${height}`, before = height;
    for (const each of film.frames) {
      path += `L${x(each.at)} ${before}`;  // steps: nothing is known of the time between two looks
      before = y(sum(each, name));
      path += `L${x(each.at)} ${before}`;
    }
    chart.append(svg("path", { d: `${path}L${width} ${height}Z`, fill: colour(style) }));
  }
  for (const each of film.frames.filter((one) => one.label)) {
    chart.append(svg("line", { x1: x(each.at), x2: x(each.at), y1: 0, y2: height, stroke: colour("line") }));
    const label = svg("text", { x: x(each.at) + 3, y: 11, "font-size": 11, fill: colour("faint") });
    label.textContent = each.label;
    chart.append(label);
  }
  const now = x(film.frames[frame].at);
  chart.append(svg("line", { x1: now, x2: now, y1: 0, y2: height, stroke: colour("ink"), "stroke-width": 2 }));
}

function showGrowth() {
  const box = byId("growth");
  if (film.kind === "snapshot") return;
  box.hidden = false;
  box.classList.toggle("none", film.growing.length === 0);
  if (!film.growing.length) {
    box.append(element("p", "Nothing grows from beginning to end of this recording."));
  }
  for (const group of film.growing) {
    box.append(element("p", `This only grows: ${group.text}`));
    const callers = box.appendChild(element("ol"));
    group.key[1].forEach((each) => callers.append(element("li", each)));
  }
}

const maps = film.devices.map((device) => new DeviceMap(device, byId("devices")));

function show(which) {
  frame = Math.max(0, Math.min(film.frames.length - 1, which));
  const now = film.frames[frame];
  byId("slider").value = frame;
  byId("moment").textContent = `${seconds(now.at)} of ${seconds(film.seconds)}${now.label ? `, ${now.label}` : ""}`;
  byId("tip").hidden = true;
  if (film.frames.length > 1) drawChart();
  maps.forEach((map) => map.draw());
}

function play() {
  const stop = playing !== 0;
  clearInterval(playing);
  playing = 0;
  if (stop) return;
  if (frame === film.frames.length - 1) show(0);
  playing = setInterval(() => {
    show(frame + 1);
    if (frame === film.frames.length - 1) play();
  }, Math.min(400, Math.max(30, 8000 / film.frames.length)));
}

byId("about").textContent = `${film.kind} of a memory pool on the ${film.driver} driver, ${new Date(film.time * 1000).toISOString()}`
  + (film.forgotten ? `; the ${film.forgotten} blocks that were given back first are forgotten` : "");
byId("film").hidden = film.frames.length < 2;
byId("slider").max = film.frames.length - 1;
byId("slider").addEventListener("input", (event) => show(Number(event.target.value)));
byId("play").addEventListener("click", play);
byId("chart").addEventListener("click", (event) => {
  const box = byId("chart").getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * film.frames.at(-1).at;
  show(film.frames.findLastIndex((each) => each.at <= at));
});
addEventListener("resize", () => show(frame));
showGrowth();
show(frame);
