// Elements, figures and bars. Whatever the service or the reader wrote goes in as text, never as markup.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A copy of what a <template> holds. */
export const fromTemplate = (id) => document.getElementById(id).content.cloneNode(true);

/** 0.8193 as "81.9%". */
export function percent(share) {
  if (share > 0 && share < 0.001) return '<0.1%';
  if (share < 1 && share > 0.999) return '>99.9%';
  return `${(share * 100).toFixed(1)}%`;
}

/** A list of rows of {label, figure, width}; width is the bar's share of its track, null for no bar. */
export function bars(rows, kind = '', tag = 'div') {
  const items = rows.map(({ label, figure, width }) => {
    const fill = element('span', { class: 'bar-fill' });
    fill.style.width = `${Math.max(0, Math.min(1, width)) * 100}%`;
    const track = element('span', { class: 'bar-track' }, fill);
    track.hidden = width === null;
    const parts = [element('span', { class: 'bar-label' }, label), track, element('span', { class: 'bar-value' }, figure)];
    return element('li', {}, element(tag, { class: 'bar', type: 'button' }, ...parts));
  });
  return element('ol', { class: `bars ${kind}` }, ...items);
}

/** Bars that are buttons: the chosen one is marked, at first the first one. */
export function choosableBars(rows, kind, onChoose) {
  const list = bars(rows, kind, 'button');
  const buttons = [...list.querySelectorAll('button')];
  const mark = (chosen) => buttons.forEach((button) => button.setAttribute('aria-pressed', button === chosen));
  buttons.forEach((button, index) => button.addEventListener('click', () => {
    mark(button);
    onChoose(index);
  }));
  mark(buttons[0]);
  return list;
}
