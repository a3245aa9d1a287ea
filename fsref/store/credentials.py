"""Who asks an object store: a profile, a file, or keys that the caller holds. Nothing here shows a secret or can be pickled."""

from typing import NoReturn


class Credentials:
    """Access keys that a program passes to ``open_root`` itself, instead of the environment, a profile or the instance's role."""

    __slots__ = ("access_key_id", "secret_access_key", "session_token")

    def __init__(self, access_key_id: str, secret_access_key: str, session_token: str | None = None) -> None:
        self.access_key_id = access_key_id
        self.secret_access_key = secret_access_key
        self.session_token = session_token

    def __repr__(self) -> str:
        return "Credentials(redacted)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("credentials are not pickled: let each process find its own")
