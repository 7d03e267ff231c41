"""Blocks of a page that a program writes, from <!-- name --> to <!-- end -->."""

import re


def write_block(page, name, lines):
    """Replace the lines of the block of this name on the page (a Path). The block must be there."""
    text = "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"])
    written, count = re.subn(
        f"<!-- {name} -->.*?<!-- end -->", lambda _: text, page.read_text(), flags=re.S
    )
    if count != 1:
        raise ValueError(f"{page.name} has {count} blocks with the name {name}; it should have one")
    page.write_text(written)
