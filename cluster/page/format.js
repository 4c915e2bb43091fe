// Numbers for people. Units are decimal, as in `crosskv status`.

const COUNT = new Intl.NumberFormat("en");
const TIME = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const BYTES = ["B", "kB", "MB", "GB", "TB", "PB"];

const digits = (value) => (value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2));

export const count = (value) => COUNT.format(value);
export const clock = (date) => TIME.format(date);
export const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(0)}%` : "–");

export function bytes(value) {
  let unit = 0;
  while (value >= 999.5 && unit < BYTES.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? value : digits(value)} ${BYTES[unit]}`;
}

export function exactBytes(value) {
  return `${count(value)} bytes`;
}

export function rate(perSecond) {
  return perSecond < 9.95 && perSecond > 0 ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

export function duration(seconds) {
  if (seconds < 0.9995) return `${digits(seconds * 1000)} ms`;
  if (seconds < 99.95) return `${digits(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

// Replicas are named role-hexadecimal; where the role is known, six digits are enough to tell them apart.
export function shortName(name) {
  const own = name.slice(name.indexOf("-") + 1);
  return own.length > 8 ? own.slice(0, 6) : own;
}
