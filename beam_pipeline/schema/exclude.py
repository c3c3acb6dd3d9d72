"""Lists of images to leave out: JSON Lines, one image per line, as the tools that look for them write them.

`imageshards write --exclude` reads them; people edit them in between.
"""

from __future__ import annotations

from msgspec import Struct


class ListedImage(Struct, frozen=True, omit_defaults=True):
    """One line.

    A line without a group is an image to leave out. Of a group, images of which one is enough, the lines without `keep`
    follow from the others: left out if a line of the group is kept, else kept. A group in which no line has `keep` is
    undecided: nothing can be left out before somebody decides, such as between two labels of the same picture.

    Attributes:
        path: below the input, with `/`, as `filename` of the record is; a name that isn't UTF-8 with surrogate escapes.
        reason: why, in words.
        group: name of the group, "" for none.
        keep: True: the image stays; False: it is left out; None: see above.
    """

    path: str
    reason: str = ""
    group: str = ""
    keep: bool | None = None
