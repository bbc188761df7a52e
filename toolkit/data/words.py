"""The scripts and common words by which the reward `language` tells languages apart."""

from __future__ import annotations

SCRIPTS: dict[str, tuple[str, ...]] = {
    "ar": ("ARABIC",),
    "el": ("GREEK",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"),
    "ko": ("HANGUL",),
    "ru": ("CYRILLIC",),
    "th": ("THAI",),
    "zh": ("CJK",),
}
"""How Unicode's names of the letters begin; of languages that are missing here, with LATIN."""
_WORDS = {
    "en": "the of and to in is that it for was on are with as be this have from or by not but you at",
    "de": "der die und das ist nicht ein eine zu den mit sich auf für von dem im auch es sie ich wir",
    "fr": "le la les des et est une dans que qui pour pas sur au avec ce il elle nous vous sont du",
    "es": "el los las que y en una por con para es del se lo como más pero su al está son muy",
    "it": "il di che è e la per non sono del della con una gli le si come anche ma nel questo più",
    "nl": "de het een en van is dat niet te in op zijn voor met aan er ook maar om bij naar wordt",
    "pt": "o os que e do da em um uma para com não por mais como mas ao ele das à seu são você",
}
COMMONEST = {code: frozenset(text.split()) for code, text in _WORDS.items()}
"""Words that make up a good part of any text in these languages, and tell them from each other."""
