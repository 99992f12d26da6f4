// Elements and figures. Whatever the service or the reader wrote goes in as text, never as markup.

/** A new element; `attributes` that are null or false are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children);
  return made;
}

/** A copy of the one element, or the several, in a <template>. */
export function fromTemplate(id) {
  return document.getElementById(id).content.cloneNode(true);
}

/** 0.8193 as "81.9%". */
export function percent(share) {
  if (share > 0 && share < 0.001) return '<0.1%';
  if (share < 1 && share > 0.999) return '>99.9%';
  return `${(share * 100).toFixed(1)}%`;
}

/** How long something took, as few digits as are of use. */
export function duration(time_ms) {
  return time_ms < 1000 ? `${Math.max(1, Math.round(time_ms))} ms` : `${(time_ms / 1000).toFixed(1)} s`;
}

export function prefersLessMotion() {
  return matchMedia('(prefers-reduced-motion: reduce)').matches;
}
