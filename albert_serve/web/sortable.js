// A list whose items are put into order by dragging their handles, or with the arrow keys on them.

import { prefersLessMotion } from './elements.js';

const MOVE_MS = 180;
const EDGE_PX = 56;
const SCROLL_PX = 14;

/** `onMove(item)` is called after each step of an item to another place. */
export class SortableList {
  #list;
  #onMove;

  constructor(list, onMove) {
    [this.#list, this.#onMove] = [list, onMove];
    list.addEventListener('pointerdown', (event) => {
      const grip = event.target.closest('.grip');
      if (grip && event.button === 0) this.#drag(grip, event);
    });
    list.addEventListener('keydown', (event) => {
      if (event.target.closest('.grip')) this.#moveByKey(event);
    });
  }

  get items() {
    return [...this.#list.children];
  }

  /** Move an item to a place; the items that make way glide there. */
  move(item, place) {
    const wanted = Math.max(0, Math.min(place, this.items.length - 1));
    if (this.items.indexOf(item) === wanted) return;
    this.#glide(() => this.#shift(item, wanted));
    this.#onMove(item);
  }

  /** Put all items into another order at once. */
  arrange(items) {
    this.#glide(() => this.#list.replaceChildren(...items));
  }

  /** Others are moved around the item: one that is taken out of the page loses focus and pointer. */
  #shift(item, wanted) {
    for (let place = this.items.indexOf(item); place > wanted; place -= 1) {
      item.after(item.previousElementSibling);
    }
    for (let place = this.items.indexOf(item); place < wanted; place += 1) {
      item.before(item.nextElementSibling);
    }
  }

  #glide(rearrange) {
    const before = new Map(this.items.map((item) => [item, item.getBoundingClientRect().top]));
    rearrange();
    if (prefersLessMotion()) return;
    for (const item of this.items) {
      if (item.classList.contains('dragged')) continue;
      for (const animation of item.getAnimations()) animation.cancel();
      const from_px = before.get(item) - item.getBoundingClientRect().top;
      if (from_px) item.animate([{ translate: `0 ${from_px}px` }, { translate: '0 0' }], { duration: MOVE_MS, easing: 'ease-out' });
    }
  }

  #moveByKey(event) {
    const item = event.target.closest('.grip').closest('li');
    const place = this.items.indexOf(item);
    const wanted = { ArrowUp: place - 1, ArrowDown: place + 1, Home: 0, End: this.items.length - 1 }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    this.move(item, wanted);
  }

  #drag(grip, down) {
    const item = grip.closest('li');
    const before = this.items;
    const start = { pointer_px: down.pageY, item_px: item.offsetTop };
    const follow = (event) => {
      scrollAtEdge(event.clientY);
      const shown_px = start.item_px + event.pageY - start.pointer_px;
      this.move(item, this.#placeAt(item, shown_px));
      item.style.translate = `0 ${shown_px - item.offsetTop}px`;
    };
    const end = (event) => {
      finished.abort();
      item.classList.remove('dragged');
      this.#glide(() => { item.style.translate = ''; });
      if (event.type === 'keydown') this.#putBack(item, before);
    };
    const finished = new AbortController();
    const { signal } = finished;
    grip.addEventListener('pointermove', follow, { signal });
    for (const kind of ['pointerup', 'pointercancel', 'lostpointercapture']) {
      grip.addEventListener(kind, end, { signal });
    }
    document.addEventListener('keydown', (event) => event.key === 'Escape' && end(event), { signal });
    grip.setPointerCapture(down.pointerId);
    item.classList.add('dragged');
  }

  /** The place of an item that is shown at `shown_px`: it takes that of one whose middle it covers. */
  #placeAt(item, shown_px) {
    const place = this.items.indexOf(item);
    const end_px = shown_px + item.offsetHeight;
    const isAbove = (other, index) => {
      const middle_px = other.offsetTop + other.offsetHeight / 2;
      return index < place ? middle_px <= shown_px : index > place && middle_px < end_px;
    };
    return this.items.filter(isAbove).length;
  }

  #putBack(item, before) {
    this.arrange(before);
    item.querySelector('.grip').focus();
    this.#onMove(item);
  }
}

function scrollAtEdge(y_px) {
  if (y_px < EDGE_PX) scrollBy(0, -SCROLL_PX);
  if (y_px > innerHeight - EDGE_PX) scrollBy(0, SCROLL_PX);
}
