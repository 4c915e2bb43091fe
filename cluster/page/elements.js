// The page's only way to make and change elements. What the server says becomes text, never markup, and what is already
// there is left alone, so that focus, selection and scroll positions outlive a refresh.

const VIEWS = new WeakMap();

export const byId = (id) => document.getElementById(id);

// A new element; children are elements or texts.
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) attribute(node, name, value);
  node.append(...children);
  return node;
}

// Sets an attribute, or removes it if the value is null.
export function attribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function hide(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Shows a figure: as text for people, exactly in the element's value.
export function figure(node, value, text, title = null) {
  attribute(node, "value", value);
  attribute(node, "title", title);
  say(node, text);
}

export function width(node, part) {
  const value = `${(100 * part).toFixed(2)}%`;
  if (node.style.width !== value) node.style.width = value;
}

// Makes the parent's children show the items, in order. A view is {node, show(item)}; an item keeps its view by its key.
export function list(parent, items, keyOf, makeView) {
  const before = VIEWS.get(parent) ?? new Map();
  const after = new Map();
  for (const item of items) {
    const key = keyOf(item);
    after.set(key, before.get(key) ?? makeView(item));
    after.get(key).show(item);
  }
  for (const [key, view] of before) if (!after.has(key)) view.node.remove();
  let place = parent.firstElementChild;
  for (const { node } of after.values()) {
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  VIEWS.set(parent, after);
}
