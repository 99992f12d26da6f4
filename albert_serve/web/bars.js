// Rows of a label, a bar and a figure.

import { element, percent } from './elements.js';

/**
 * Show `rows` of {label, score, width} in `list`; width is the bar's share of its track. `figure`
 * is shown in place of the score in percent.
 *
 * Rows that are there already are kept, so that their bars move to the new width. With `onChoose`
 * each row is a button, and the chosen one is marked.
 */
export function showBars(list, rows, { onChoose = null, chosen = -1 } = {}) {
  while (list.children.length > rows.length) list.lastElementChild.remove();
  while (list.children.length < rows.length) list.append(makeRow(onChoose !== null));
  rows.forEach((row, index) => fillRow(list.children[index].firstElementChild, row, index === 0));
  if (onChoose === null) return;
  [...list.children].forEach((item, index) => {
    item.firstElementChild.onclick = () => {
      mark(list, index);
      onChoose(index);
    };
  });
  mark(list, chosen);
}

function makeRow(isButton) {
  const parts = [
    element('span', { class: 'bar-label' }),
    element('span', { class: 'bar-track' }, element('span', { class: 'bar-fill' })),
    element('span', { class: 'bar-value' }),
  ];
  const row = isButton ? element('button', { type: 'button', class: 'bar' }, ...parts) : element('div', { class: 'bar' }, ...parts);
  return element('li', {}, row);
}

function fillRow(row, { label, score, width, figure }, isBest) {
  const [labelPart, track, value] = row.children;
  labelPart.replaceChildren(label);
  row.classList.toggle('best', isBest);
  track.hidden = width === null;
  value.textContent = figure ?? (width === null ? score.toFixed(3) : percent(score));
  // Read first: a bar that is new grows from nothing to its width.
  void track.firstElementChild.offsetWidth;
  track.firstElementChild.style.width = `${Math.max(0, Math.min(1, width ?? 0)) * 100}%`;
}

function mark(list, chosen) {
  [...list.children].forEach((item, index) => {
    item.firstElementChild.setAttribute('aria-pressed', String(index === chosen));
  });
}
