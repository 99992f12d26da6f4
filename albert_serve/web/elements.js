// Elements, percentages and bars. Texts of the service or the user are inserted as text, never as markup.

export function element(tag, attributes = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  created.append(...children);
  return created;
}

/** Copy the content of a <template>. */
export const fromTemplate = (id) => document.getElementById(id).content.cloneNode(true);

/** Format 0.8193 as "81.9%". */
export function percent(fraction) {
  if (fraction > 0 && fraction < 0.001) return '<0.1%';
  if (fraction < 1 && fraction > 0.999) return '>99.9%';
  return `${(fraction * 100).toFixed(1)}%`;
}

/** Return a list of rows of {label, figure, width}. The width is a fraction of the track; null: no bar. */
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

/** Return bars that are buttons. The selected bar is marked, initially the first. */
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
