"""Write support tickets with personal data, made by Faker from templates; the test's are held out.

    python examples/support_tickets.py FOLDER

The folder gets train.jsonl and test.jsonl, for `finetune --token-classification` and
`evaluate --token-classification`. Needs faker.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from faker import Faker

_COUNTS: Final = {"train": 2000, "test": 500}
# Every third template is held out for the test.
_TEMPLATES: Final = (
    "Hello, this is {name}. My order {order} has not arrived yet.",
    "Dear team, I am {name} and I live in {city}. Please call me on {phone}.",
    "Hi, {name} here: order {order} came to {address} in {city}, but the box was open.",
    "I moved to {address}, {city}. Can you change it for my account {email}?",
    "My new address is {address} in {city}; the old one is wrong. Yours, {name}",
    "Please send the parcel to {city}, {address}. Order number: {order}.",
    "The card {card} was charged twice on {date}. Please refund it.",
    "You took money from my card ({card}) for order {order}, which I cancelled on {date}.",
    "On {date} I paid with card {card}, and {name} at your desk said it had failed.",
    "Write to {email} or phone {phone} if you need anything else. Regards, {name}",
    "Reply to {email}, please. I cannot log in since {date}.",
    "Contact: {name}, {email}, {phone}.",
    "My account number is {iban}. The refund for {order} should go there.",
    "Refund {order} to {iban} (account of {name}).",
    "The bank account {iban} belongs to {name} from {city}; please remove it.",
    "I spoke to {name} on {date}, and nobody has called {phone} since.",
    "Your colleague {name} promised on {date} to call me back at {phone}.",
    "Nobody answers. I am waiting since {date}: {phone}, ask for {name}.",
)
_PLACE: Final = re.compile(r"\{(\w+)\}")


def make_ticket(template: str, faker: Faker) -> dict[str, Any]:
    """Return a ticket as `text` and `entities`."""
    text, entities = "", []
    for number, part in enumerate(_PLACE.split(template)):
        if number % 2:
            value = _value(part, faker)
            start, label = len(text), part.upper()
            entities.append({"start": start, "end": start + len(value), "label": label})
            text += value
        else:
            text += part
    return {"text": text, "entities": entities}


def _value(kind: str, faker: Faker) -> str:
    values: dict[str, Callable[[], str]] = {
        "name": faker.name,
        "city": faker.city,
        "address": faker.street_address,
        "phone": faker.phone_number,
        "email": faker.email,
        "order": lambda: faker.bothify("??-######"),
        "card": faker.credit_card_number,
        "iban": faker.iban,
        "date": lambda: faker.date(faker.random_element(("%d %B %Y", "%Y-%m-%d", "%m/%d/%y"))),
    }
    return values[kind]()


def write_tickets(folder: Path) -> None:
    """Write the files; the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    faker = Faker(("en_US", "en_GB"))
    faker.seed_instance(0)
    held_out = _TEMPLATES[2::3]
    templates = {
        "train": [one for one in _TEMPLATES if one not in held_out],
        "test": held_out,
    }
    for split, count in _COUNTS.items():
        tickets = (
            make_ticket(templates[split][n % len(templates[split])], faker) for n in range(count)
        )
        lines = "".join(f"{json.dumps(ticket, ensure_ascii=False)}\n" for ticket in tickets)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write_tickets(Path(sys.argv[1]))
