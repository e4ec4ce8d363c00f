"""Fonts that pages are printed in: those of training, and others on which the model is measured.

They are free fonts of Debian: `apt-get install fonts-anonymous-pro fonts-b612 fonts-cabin fonts-cantarell
fonts-croscore fonts-crosextra-caladea fonts-crosextra-carlito fonts-dejavu fonts-ebgaramond fonts-firacode
fonts-freefont-ttf fonts-go fonts-hack fonts-inconsolata fonts-jetbrains-mono fonts-lato fonts-liberation
fonts-linuxlibertine fonts-monofur fonts-noto-core fonts-noto-mono fonts-open-sans fonts-oxygen fonts-play
fonts-quicksand fonts-roboto-unhinted fonts-sil-charis fonts-sil-gentium-basic fonts-tuffy fonts-urw-base35
fonts-vollkorn`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from PIL import ImageFont

FOLDER = Path("/usr/share/fonts")

MONOSPACED = (
    "Anonymous Pro", "Cousine", "DejaVu Sans Mono", "Fira Code", "FreeMono", "Hack", "Inconsolata", "JetBrains Mono",
    "Liberation Mono", "Linux Libertine Mono O", "Nimbus Mono PS", "Noto Mono", "Oxygen Mono", "monofur",
)  # fmt: skip
PROPORTIONAL = (
    "Arimo", "C059", "Cabin", "Caladea", "Cantarell", "Charis SIL", "DejaVu Sans", "DejaVu Serif", "EB Garamond",
    "FreeSans", "FreeSerif", "Liberation Sans", "Liberation Serif", "Linux Biolinum O", "Linux Libertine O",
    "Nimbus Roman", "Nimbus Sans", "Nimbus Sans Narrow", "Noto Sans", "Noto Serif", "Open Sans", "Oxygen-Sans", "P052",
    "Play", "Quicksand", "Roboto", "Roboto Condensed", "Tinos", "Tuffy", "URW Bookman", "URW Gothic", "Vollkorn",
)  # fmt: skip
HELD_OUT = ("B612", "B612 Mono", "Carlito", "Gentium Basic", "Gentium Book Basic", "Go", "Go Mono", "Lato")
"""Families that do not occur in training, nor do fonts with the same shapes under another name."""
TOO_THIN = ("Hairline", "Thin", "ExtraLight", "Extra Light")


@functools.cache
def _families() -> Mapping[str, Mapping[str, Path]]:
    """Return the file of each style of each family."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(FOLDER.rglob("*.?tf")):
        family, style = ImageFont.truetype(str(path), 20).getname()
        found.setdefault(family or "", {})[style or ""] = path
    return found


@functools.cache
def styles(family: str, *, slanted: bool = False) -> tuple[Path, ...]:
    """Return the files of a family's upright or slanted styles.

    Raises:
        SystemExit: the family is not installed.
    """
    if family not in _families():
        raise SystemExit(f'The font "{family}" is not installed. The packages are listed in training/reading/fonts.py.')
    named = {style: path for style, path in _families()[family].items() if not any(thin in style for thin in TOO_THIN)}
    chosen = [path for style, path in named.items() if ("Italic" in style or "Oblique" in style) == slanted]
    return tuple(chosen or named.values())


@functools.lru_cache(maxsize=4096)
def load(path: Path, size: int) -> ImageFont.FreeTypeFont:
    """Return a font of `size` pixels."""
    return ImageFont.truetype(str(path), size)
