"""Commands that look at a run which has an object server of its own."""

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator

from fsref.inspection.find import Place
from fsref.pipeline.layout import SERVER_FOLDER
from fsref.pipeline.objectserver import Home, reachable
from fsref.reaper import Purge
from fsref.store.posix import raise_mapped


@contextlib.contextmanager
def at_hand(place: Place) -> Iterator[Place]:
    """The place while its store can be reached: the run's own object server is started if it has one that does not run."""
    if place.run_dir is None:
        yield place
        return
    home = Home(root=place.root, run=place.run, run_dir=place.run_dir)
    with reachable(place.section, home, lambda text: print(text, file=sys.stderr)) as section:  # noqa: T201  said, not silent
        yield dataclasses.replace(place, section=section)


def without_server(place: Place, done: Purge) -> Purge:
    """After the purge of a run with its folder: what its object server stored goes too, now that it is stopped."""
    assert place.run_dir is not None
    folder = place.run_dir / SERVER_FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return done
    count = sum(len(files) for _, _, files in os.walk(folder))
    left = tuple(name for name in done.left if name != SERVER_FOLDER)
    try:
        shutil.rmtree(folder)
        if not left:
            place.run_dir.rmdir()
    except OSError as e:
        raise_mapped(e, f"removing {folder}")
    return dataclasses.replace(done, removed={**done.removed, SERVER_FOLDER: count}, left=left)
