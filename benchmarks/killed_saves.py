"""Kill one rank at random points of saving, many times, and check that no checkpoint is lost and no rank hangs.

    python -m benchmarks.killed_saves --times 20 --ranks 4
"""

from __future__ import annotations

import argparse
import time

from tests.killed_save import kill_and_check
from tests.state_model import remove_shared_folders


def main() -> None:
    """Run the trials, every second one asynchronous; the first that fails ends the program with its error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    try:
        for trial in range(given.times):
            began = time.monotonic()
            text = kill_and_check(given.ranks, asynchronous=trial % 2 == 1)
            print(f"{trial + 1:3}  {text}  ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        remove_shared_folders()


if __name__ == "__main__":
    main()
