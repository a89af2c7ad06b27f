"""The type checker of the test run: beartype, with an int accepted where a float is annotated (PEP 484)."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
