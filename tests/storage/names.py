"""Names that are legal and odd."""

from __future__ import annotations

import unicodedata

ODD_NAMES = [
    *("plain.jpg", "a space.jpg", " leading and trailing .jpg", "trailing space ", "trailing dots..", "a..b.jpg"),
    *("hash#1.jpg", "generation.jpg#123", "percent%20.jpg", "slash%2F.jpg", "percent%.jpg", "plus+.jpg"),
    *("brackets[x].jpg", "[x]*", "star*.jpg", "question?.jpg", "curly{a,b}.jpg", "quote'\".jpg", "back\\slash.jpg"),
    *("semi;colon,comma&and=equals.jpg", "tilde~.jpg", "at@colon:.jpg", "日本語 🐈.jpg", "x" * 240 + ".jpg"),
    *("folder/with #/nested.jpg", "folder/trailing space /x.jpg"),
    *(unicodedata.normalize("NFC", name) for name in ("größe é 1.jpg", "twin é.jpg")),
    *(unicodedata.normalize("NFD", name) for name in ("größe é 2.jpg", "twin é.jpg")),
]
# obstore asks for none of these, or for another object.
REFUSED_BY_OBSTORE = [
    *("double//slash.jpg", "/leading slash.jpg", "dot/./in.jpg", "dots/../in.jpg", "a/b//c///d.jpg"),
    *("tab\t.jpg", "new\nline.jpg", "delete\x7f.jpg"),
]
ONLY_REMOTE = ["y" * 900 + ".jpg", *REFUSED_BY_OBSTORE[:5]]
