// A request as code to copy: for curl, and for the Python client.

const MAX_LINE = 88;
const KEY_VARIABLE = 'ALBERT_API_KEY';

/** A command for a POSIX shell that sends `request` to `task`. */
export function curl(service, task, request) {
  const lines = [`curl ${shellQuote(`${service.url}/${task}`)}`, "-H 'Content-Type: application/json'"];
  if (service.wantsKey) lines.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  lines.push(`-d ${shellQuote(json(request))}`);
  return lines.join(' \\\n  ');
}

/** A Python program that prints what `client.METHOD(...given, ...options)` answers. */
export function python(service, { method, given, options }) {
  const keyArgument = service.wantsKey ? `, api_key=os.environ["${KEY_VARIABLE}"]` : '';
  const modelArgument = service.model === null ? '' : `, model=${literal(service.model)}`;
  const parts = [
    ...given.map((value) => ['', value]),
    ...Object.entries(options).map(([name, value]) => [`${name}=`, value]),
  ];
  return [
    ...(service.wantsKey ? ['import os', ''] : []),
    'from albert_serve.client import AlbertClient',
    '',
    `with AlbertClient(${literal(service.root)}${modelArgument}${keyArgument}) as albert:`,
    `    answer = ${bracketed(`albert.${method}(`, parts, ')', 4, 'answer = '.length)}`,
    'print(answer)',
  ].join('\n');
}

/** JSON in one line, with the spaces that a reader would set. */
function json(value) {
  if (Array.isArray(value)) return `[${value.map(json).join(', ')}]`;
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  const items = Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${json(item)}`);
  return `{${items.join(', ')}}`;
}

function shellQuote(text) {
  return /^[\w:/.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A value of JSON as a Python expression; `column` is where in an indented line it starts. */
function literal(value, indent = 0, column = 0) {
  if (Array.isArray(value)) {
    return bracketed('[', value.map((item) => ['', item]), ']', indent, column);
  }
  if (value !== null && typeof value === 'object') {
    const parts = Object.entries(value).map(([name, item]) => [`${JSON.stringify(name)}: `, item]);
    return bracketed('{', parts, '}', indent, column);
  }
  if (value === true) return 'True';
  if (value === false) return 'False';
  if (value === null) return 'None';
  return JSON.stringify(value); // a string of JSON is one of Python as well
}

/** Parts of [prefix, value] in brackets: in one line if they fit, or each in its own. */
function bracketed(start, parts, end, indent, column) {
  const flat = start + parts.map(([prefix, value]) => prefix + literal(value, -Infinity)).join(', ') + end;
  if (indent + column + flat.length <= MAX_LINE) return flat;
  const [[prefix, only] = []] = parts;
  if (parts.length === 1 && prefix === '' && typeof only === 'object') {
    return `${start}${literal(only, indent, column + start.length)}${end}`;
  }
  const inner = indent + 4;
  const lines = parts.map(([name, value]) => `${' '.repeat(inner)}${name}${literal(value, inner, name.length + 1)},`);
  return `${start}\n${lines.join('\n')}\n${' '.repeat(indent)}${end}`;
}
