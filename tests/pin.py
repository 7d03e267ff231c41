"""Pin another version of a package, in requirements.txt and at the end of every script at once.

python tests/pin.py torch 2.14.1
"""

import re
import sys

from lineage import PATHS, ROOT


def main(package, version):
    pin = re.compile(rf"(?m)^((?:#     \")?{re.escape(package)}(?:\[[\w,-]+\])?==)[\w.+!-]+")
    changed = []
    for path in [ROOT / "requirements.txt", *(ROOT / PATHS[name] for name in sorted(PATHS))]:
        text = path.read_text()
        path.write_text(pin.sub(rf"\g<1>{version}", text))
        if pin.search(text):
            changed.append(path.name)
    if not changed:
        sys.exit(f"error: no file pins {package}")
    print(f"{package}=={version} in {', '.join(changed)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
