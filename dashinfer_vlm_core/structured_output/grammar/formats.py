"""Regular expressions of the formats of JSON schema, each of bounded length."""

from __future__ import annotations

from collections.abc import Mapping

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_HOUR_AND_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR_AND_MINUTE})"
_COUNT = "[0-9]{1,6}"
_SECONDS = f"{_COUNT}S"
_MINUTES = f"{_COUNT}M({_SECONDS})?"
_HOURS = f"{_COUNT}H({_MINUTES})?"
_DAYS = f"{_COUNT}D"
_MONTHS = f"{_COUNT}M({_DAYS})?"
_YEARS = f"{_COUNT}Y({_MONTHS})?"
_TIME_OF_DURATION = f"T({_HOURS}|{_MINUTES}|{_SECONDS})"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = "[A-Za-z0-9_+-]{1,32}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,8}}"
_IPV6 = (
    f"({_GROUP}:){{7}}{_GROUP}",
    *(f"({_GROUP}:){{1,{before}}}(:{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)),
    f"({_GROUP}:){{1,7}}:",
    f":(:{_GROUP}){{1,7}}",
    "::",
)

FORMATS: Mapping[str, str] = {
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P({_COUNT}W|({_DAYS}|{_MONTHS}|{_YEARS})({_TIME_OF_DURATION})?|{_TIME_OF_DURATION})",
    "email": rf"{_NAME}(\.{_NAME}){{0,1}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "|".join(_IPV6),
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
"""RFC 3339, ISO 8601 (durations), RFC 1123 (names of hosts), RFC 4291 (IPv6) and RFC 9562 (UUIDs)."""
