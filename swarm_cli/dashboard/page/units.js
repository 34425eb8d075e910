// Words and numbers: queries with their variables filled in, legends, and values in their unit.
"use strict";

/** `expr` with `$name` and `${name}` replaced; a variable without a value matches everything. */
function substituted(expr, values) {
  return expr.replace(/\$\{?(\w+)\}?/g, (_, name) => values[name] ?? ".*");
}

/** A legend template such as `{{node}} p95` with a series' labels; without a template, the labels themselves. */
function legendText(template, labels) {
  const text = template.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? "").trim();
  return text || Object.entries(labels).filter(([name]) => name !== "__name__").map(([name, value]) => `${name}=${value}`).join(" ") || "value";
}

/** Three significant digits, thousands as k, M, G. */
function short(value, digits = 3) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(1);
  for (const [limit, suffix] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return plain(value / (suffix === "k" ? 1e3 : limit), digits) + suffix;
  return plain(value, digits);
}

function plain(value, digits) {
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e4) return String(value);
  const decimals = Math.max(0, digits - Math.max(1, Math.floor(Math.log10(size || 1)) + 1));
  return value.toFixed(Math.min(6, size > 0 && size < 0.1 ? digits + 1 : decimals));
}

/** A duration in seconds, in the largest fitting unit. */
function duration(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return plain(value * 1e6, 3) + " µs";
  if (size < 1) return plain(value * 1e3, 3) + " ms";
  for (const [limit, name] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (size >= 2 * limit) return plain(value / limit, 2) + " " + name;
  return plain(value, 3) + " s";
}

function bytes(value) {
  for (const [limit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (Math.abs(value) >= limit) return plain(value / limit, 3) + " " + name;
  return plain(value, 3) + " B";
}

/** `value` in a Grafana unit: percentunit, percent, s, bytes, Bps, sci, short, `suffix: x`. */
function inUnit(value, unit, decimals = null) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "percentunit") return percent(100 * value, decimals);
  if (unit === "percent") return percent(value, decimals);
  if (unit === "s") return duration(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "Bps") return bytes(value) + "/s";
  if (unit === "sci") return value === 0 ? "0" : value.toExponential(1);
  const text = decimals === null ? short(value) : value.toFixed(decimals);
  return unit.startsWith("suffix:") ? text + (unit.slice(7).trim().startsWith("/") ? "" : " ") + unit.slice(7).trim() : text;
}

function percent(value, decimals) {
  return value.toFixed(decimals ?? (Math.abs(value) < 10 && value !== 0 ? 1 : 0)) + " %";
}

/** A number beside an axis whose ticks are `apart`: as few digits as distinguish them, and no words. */
function tickText(value, unit, apart) {
  const scale = unit === "percentunit" ? 100 : 1, decimals = decimalsOf(apart * scale);
  if (unit === "percentunit" || unit === "percent") return percent(value * scale, decimals);
  if (["s", "bytes", "Bps", "sci"].includes(unit)) return inUnit(value, unit);
  return (Math.abs(value) >= 1e4 ? short(value) : value.toFixed(decimals)) + (unit.startsWith("suffix: /") ? unit.slice(8) : "");
}

function decimalsOf(step) {
  let decimals = 0;
  while (decimals < 8 && Math.abs(Math.round(step * 10 ** decimals) / 10 ** decimals - step) > 1e-6 * step) decimals++;
  return decimals;
}
