"""Show runs in the browser as they grow: losses, learning rate, window, throughput, settings.

    python scripts/view.py                                            the runs in logs, as a page
    python scripts/view.py logs records/small/2026-11-27_LargeTable   beside a record
    python scripts/view.py logs --out runs.html                       one file that works offline

Only this machine can open the page, and it changes nothing. Ctrl-C ends it. Exit code: 0 written,
2 bad input, 130 ended by Ctrl-C.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, start

from view.page import write_page
from view.runs import Store, find_folders
from view.server import Server


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    add("paths", nargs="*", default=["logs"], metavar="LOGS", help="run logs, folders, or records")
    add("--port", type=int, default=8321, help="of the page; 0: any free one (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the page to a file instead")
    given = parser.parse_args(argv)
    store = Store(find_folders(given.paths))
    if given.out:
        write_page(store, given.out)
        print(f"wrote {given.out}")
        return 0
    with Server(store, given.port) as server:
        print(f"{server.url} shows {', '.join(given.paths)}. Ctrl-C ends it.", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    start(main)
