"""Random texts of pages: lines of receipts, words, amounts, dates, and characters without meaning."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from training import vocabulary

CHARACTERS = "".join(chr(code) for code in range(32, 127))
"""The characters that the model reads."""
SYMBOLS = "-./:,#%*()&+$'\"!?=@_;<>[]"
_SHOPS = ("Market", "Bakery", "Coffee", "Books", "Garden", "Pharmacy", "Garage", "Hotel", "Cinema", "Shop", "Store")
_FIELDS = ("Date", "Time", "Table", "No.", "Order", "Receipt", "Cashier", "Card", "Phone", "Tel.", "Room", "Ref")
_SUMS = ("Tax", "VAT 7%", "VAT 19%", "Tip", "Subtotal", "Change", "Cash", "Discount")
TOTALS = ("Total", "TOTAL", "Sum", "Amount due", "To pay")
_CLOSINGS = ("Thank you!", "THANK YOU", "Have a nice day", "Please come again", "See you soon!")
_CURRENCIES = ("", "", "", "$", "EUR ", "USD ")


@dataclass(frozen=True, slots=True)
class Text:
    """The lines of a page, and the amount to pay if it is a receipt."""

    lines: tuple[str, ...]
    total: str | None = None


def amount(rng: random.Random) -> str:
    """Return a price."""
    whole = rng.choice((rng.randint(0, 9), rng.randint(0, 99), rng.randint(0, 999), rng.randint(0, 9999)))
    return f"{rng.choice(_CURRENCIES)}{whole}{rng.choice('...,')}{rng.randint(0, 99):02}"


def word(rng: random.Random) -> str:
    """Return a word of the vocabulary, or one that does not exist, in lower, upper or title case."""
    kind = rng.random()
    if kind < 0.5:
        chosen = rng.choice(vocabulary.WORDS)
    elif kind < 0.9:
        chosen = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8)))
    else:
        return "".join(rng.choices(string.ascii_letters + string.digits + SYMBOLS, k=rng.randint(1, 7)))
    return rng.choice((chosen, chosen, chosen.title(), chosen.title(), chosen.upper()))


def line(rng: random.Random, width: int) -> str:
    """Return a line of at most `width` characters, at least 4."""
    kind = rng.random()
    if kind < 0.3:
        return _fit(_spread(rng, _item(rng), amount(rng), width), width)
    if kind < 0.4:
        return _fit(f"{rng.choice(_FIELDS)}{rng.choice((':', ' ', ': '))}{_value(rng)}", width)
    if kind < 0.43:
        return _fit("".join(rng.choices(CHARACTERS, k=rng.randint(1, width))), width)
    words = [word(rng)]
    while rng.random() < 0.8 and sum(map(len, words)) + len(words) < width:
        words.append(rng.choice((word, word, word, _value))(rng))
    return _fit(" ".join(words), width)


def lines(rng: random.Random, count: int, width: int) -> Text:
    """Return a text of `count` lines."""
    return Text(tuple(line(rng, width) for _ in range(count)))


def receipt(rng: random.Random, count: int, width: int) -> Text:
    """Return a receipt of at most `count` lines, at least 3."""
    total = amount(rng)
    head = [f"{word(rng).title()} {rng.choice(_SHOPS)}"]
    if count > 5:
        head.append(f"{rng.choice(_FIELDS)}: {_value(rng)}")
    tail = [_spread(rng, rng.choice(TOTALS), total, width)]
    if count > 6:
        tail.insert(0, _spread(rng, rng.choice(_SUMS), amount(rng), width))
    if count > 4 and rng.random() < 0.6:
        tail.append(rng.choice(_CLOSINGS))
    items = [_spread(rng, _item(rng), amount(rng), width) for _ in range(max(count - len(head) - len(tail), 1))]
    fitted = tuple(_fit(each, width) for each in (*head, *items, *tail))
    return Text(fitted, total if any(each.endswith(total) for each in fitted[-2:]) else None)


def _item(rng: random.Random) -> str:
    name = " ".join(word(rng) for _ in range(rng.choice((1, 1, 2))))
    return rng.choice((name, name, f"{rng.randint(1, 12)} {name}", f"{rng.randint(1, 9)} x {name}"))


def _spread(rng: random.Random, left: str, right: str, width: int) -> str:
    """Return two texts in one line; the second is at the right end in most cases."""
    left = left[: max(width - len(right) - 2, 1)].rstrip()
    gap = width - len(left) - len(right) if rng.random() < 0.7 else 1
    return left + " " * max(gap, 1) + right


def _value(rng: random.Random) -> str:
    year, month, day = rng.randint(1990, 2035), rng.randint(1, 12), rng.randint(1, 28)
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    return rng.choice(
        (
            f"{year}-{month:02}-{day:02}", f"{day:02}.{month:02}.{year}", f"{month}/{day}/{year % 100:02}",
            f"{hour:02}:{minute:02}", str(rng.randint(0, 99)), str(rng.randint(0, 999_999)), amount(rng),
            "".join(rng.choices(string.digits, k=rng.randint(3, 10))),
            "".join(rng.choices(string.ascii_uppercase + string.digits, k=rng.randint(3, 8))),
        )
    )  # fmt: skip


def _fit(text: str, width: int) -> str:
    cut = text[:width].strip()
    return cut or "-"
