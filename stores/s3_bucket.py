"""The objects of an S3 store: whole documents that are replaced only from the version they were read in.

A document is JSON whose first line holds the head: small facts that a ranged read gets without the rest. Every body has a nonce of
its own. An ETag is a hash of the content, so without it two equal bodies could not be told apart, nor could a writer whose answer
was lost know whether the version that stands now is its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from lousho_ray.errors import MissingDependencyError, StorageError
from lousho_ray.stores.json_form import damaged, dumps, loads

if TYPE_CHECKING:
    from obstore.store import S3Config
    from obstore.store import S3Store as Client

    from lousho_ray.stores.location import StoreLocation

A = TypeVar("A")
T = TypeVar("T")

HEAD_BYTES = 4_096
"""What a read of a head asks for; a longer first line costs a second request."""

SIDE_BY_SIDE = 32
"""Requests on their way at one time when many objects are read."""

MOST_TRIES = 40
"""How often a change is worked out anew because somebody else was faster."""

REMOVAL_MS = 10_000
"""How long an object that is marked for removal is left to the one who marked it."""


_NO_BUCKET = "NoSuchBucket"


class Conflict(Exception):  # noqa: N818 - no error: the sign to read again
    """The object is not in the version that the write was for."""


@dataclass(frozen=True, slots=True)
class Document:
    """What to write: the head, and the lines after it as they are stored."""

    head: Mapping[str, Any]
    rest: str = "}"

    @classmethod
    def of(cls, head: Mapping[str, Any], fields: Mapping[str, str]) -> Document:
        """A document of the head and the JSON text of each further field."""
        return cls(head, ",\n".join(f'"{name}":{text}' for name, text in fields.items()) + "\n}")

    def encode(self, nonce: str) -> bytes:
        head = dumps({**self.head, "nonce": nonce}, "a record head")
        return f'{{"head":{head}{"" if self.rest == "}" else ","}\n{self.rest}'.encode()


@dataclass(frozen=True, slots=True)
class Stored:
    """A version of an object. `text` is the whole of it, or the first line alone."""

    etag: str
    head: Mapping[str, Any]
    text: str

    @property
    def gone(self) -> bool:
        """Whether it only says that there is nothing: it stands where a write that may still be on its way must not land."""
        return bool(self.head.get("gone"))

    @property
    def saved_at(self) -> int:
        """Epoch milliseconds."""
        found = self.head.get("savedAt")
        return found if isinstance(found, int) else 0

    def with_head(self, **changes: Any) -> Document:
        """The same, wholly read, record with some facts of its head changed."""
        return Document({**self.head, **changes}, self.text.partition("\n")[2])


class _Head(dict[str, Any]):
    """The facts of a stored object. One that is missing is damage, whoever asks for it."""

    def __init__(self, facts: Mapping[str, Any], what: str, path: str) -> None:
        super().__init__(facts)
        self._what, self._path = what, path

    def __missing__(self, key: str) -> Any:
        raise damaged(self._what, f"its head has no {key!r}", self._path)


def import_obstore() -> Any:
    """The package, loaded when an S3 store is made.

    Raises:
        MissingDependencyError: `LOUSHO_PEER_MISSING`.
    """
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        command = 'pip install "lousho-ray[s3]"'
        raise MissingDependencyError(f"S3 stores need obstore: {command}", package="obstore", install_command=command) from error
    return obstore


class Bucket:
    """The objects below one prefix of a bucket. Its methods run on the store's own event loop.

    Attributes:
        conditional: Whether a write for another version than the current one fails.
    """

    def __init__(self, location: StoreLocation, now: Callable[[], int]) -> None:
        self._obstore = import_obstore()
        self._location = location
        self._now = now
        self.conditional = not location.s3.single_writer
        self._client = _client(location)
        self._probe = asyncio.Lock()
        self._checked = not self.conditional

    @property
    def url(self) -> str:
        return self._location.url

    async def check(self) -> None:
        """Makes sure, once, that the bucket is there and refuses writes whose condition does not hold.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`.
        """
        async with self._probe:
            if self._checked:
                return
            key = f"probe/{secrets.token_hex(8)}.json"
            try:
                await self._check_conditions(key)
            finally:
                with suppress(StorageError):
                    await self.delete([key])
            self._checked = True

    async def _check_conditions(self, key: str) -> None:
        bodies = [Document({"probe": number}).encode(secrets.token_hex(8)) for number in range(3)]
        try:
            first = await self._put(key, bodies[0], None)
            second = await self._put(key, bodies[1], first)
        except Conflict as conflict:
            raise self._no_conditions("refused a write whose condition held") from conflict
        for base, condition in ((None, "If-None-Match: *"), (first, "If-Match")):
            with suppress(Conflict):
                await self._put(key, bodies[2], base)
                raise self._no_conditions(f"ignored the condition {condition!r}")
        if not first or not second:
            raise self._no_conditions("answers without an ETag")

    def _no_conditions(self, what: str) -> StorageError:
        return StorageError(
            f"{self.url} {what}. Claims and leases need conditional writes (If-None-Match and If-Match), as Amazon S3, MinIO and "
            "Cloudflare R2 have them; pass single_writer=True only if one process alone writes there.",
            path=self.url,
        )

    # -------------------------------------------------------------------------------------------------------------- reading

    async def read(self, key: str, *, whole: bool = True) -> Stored | None:
        """The object as it is now. One that is being removed is waited for."""
        until = time.monotonic() + REMOVAL_MS / 1000
        while True:
            found = await self._read(key, whole)
            if found is None or found.head.get("removedBy", 0) <= self._now() or time.monotonic() >= until:
                return found
            await asyncio.sleep(0.02)

    async def etag(self, key: str) -> str | None:
        """The version of an object."""
        try:
            return (await self._obstore.head_async(self._client, key))["e_tag"] or ""
        except FileNotFoundError:
            return None
        except self._failures as error:
            raise self._failed("read", key, error) from error

    async def keys(self, folder: str, *, prefix: str = "") -> list[str]:
        """The names of the objects below `folder` that start with `prefix`, in order. A name may have folders of its own."""
        start = f"{folder}/{prefix}"
        found: list[str] = []
        try:
            stream = self._obstore.list(self._client, folder, offset=start if prefix else None, chunk_size=1_000)
            async for page in stream:
                names = [meta["path"] for meta in page]
                found += [name[len(folder) + 1 :] for name in names if name.startswith(start)]
                if names and names[-1] > start and not names[-1].startswith(start):
                    break
        except self._failures as error:
            raise self._failed("list", folder, error) from error
        return found

    async def read_all(self, keys: Iterable[str], *, whole: bool = True) -> list[Stored | None]:
        return await side_by_side(lambda key: self.read(key, whole=whole), keys)

    async def _read(self, key: str, whole: bool) -> Stored | None:
        options = None if whole else {"range": (0, HEAD_BYTES)}
        try:
            result = await self._obstore.get_async(self._client, key, options=options)
            body = bytes(await result.bytes_async())
        except self._failures as error:
            if isinstance(error, FileNotFoundError) and _NO_BUCKET not in str(error):
                return None
            raise self._failed("read", key, error) from error
        if not whole and b"\n" not in body and result.meta["size"] > len(body):
            return await self._read(key, True)
        what, path = f"the record {key}", self.url
        try:
            text = body.decode() if whole else body.partition(b"\n")[0].decode()
        except UnicodeDecodeError as error:
            raise damaged(what, "it is not UTF-8", path) from error
        first = loads(text.partition("\n")[0].removesuffix(",") + "}", what, path)
        head = first.get("head") if isinstance(first, dict) else None
        if not isinstance(head, dict):
            raise damaged(what, "it has no head", path)
        return Stored(result.meta["e_tag"] or "", _Head(head, what, path), text)

    def fields(self, stored: Stored, what: str) -> dict[str, Any]:
        """All of a wholly read object but its head, parsed. Every call builds it new."""
        found: dict[str, Any] = loads(stored.text, what, self.url)
        del found["head"]
        return found

    # -------------------------------------------------------------------------------------------------------------- writing

    async def put(self, key: str, document: Document, base: str | None) -> str:
        """Replaces the version `base`; `None` creates the object.

        A write whose answer was lost is sent again: it cannot land twice, and what it left there is known by its nonce.

        Returns:
            The new version.

        Raises:
            Conflict: The object is in another version.
            StorageError: `LOUSHO_STORAGE_FAILED`. The write may have landed, or may land later, unless somebody writes before it.
        """
        nonce = secrets.token_hex(8)
        body = document.encode(nonce)
        try:
            try:
                return await self._put(key, body, base)
            except StorageError as error:
                if isinstance(error.__cause__, self._refusals):
                    raise
                return await self._put(key, body, base)
        except Conflict:
            found = await self._read(key, False)
            if found is not None and found.head.get("nonce") == nonce:
                return found.etag
            raise

    async def change(self, key: str, decide: Callable[[Stored | None], tuple[Document | None, T]], *, whole: bool = False) -> T:
        """Reads an object, asks `decide` what to write in its place (`None`: nothing) and writes it, until nobody comes between.

        Returns:
            The answer that `decide` gave together with what was written.
        """
        for attempt in range(MOST_TRIES):
            await pause(attempt)
            found = await self.read(key, whole=whole)
            document, answer = decide(found)
            if document is None:
                return answer
            with suppress(Conflict):
                await self.put(key, document, None if found is None else found.etag)
                return answer
        raise StorageError(f"{key} in {self.url} was not changed: others changed it {MOST_TRIES} times meanwhile.", path=self.url)

    async def remove(self, key: str, base: str) -> bool:
        """Deletes an object that is still in the version `base`; `False` when it is not.

        S3 has no conditional delete that every backend knows, so the object is marked first; who reads the mark waits.
        """
        try:
            await self.put(key, Document({"gone": True, "removedBy": self._now() + REMOVAL_MS}), base)
        except Conflict:
            return False
        await self.delete([key])
        return True

    async def delete(self, keys: list[str]) -> None:
        """Deletes objects in whatever version they are."""
        if not keys:
            return
        try:
            await self._obstore.delete_async(self._client, keys)
        except FileNotFoundError:
            return
        except self._failures as error:
            raise self._failed("delete", keys[0], error) from error

    async def _put(self, key: str, body: bytes, base: str | None) -> str:
        mode: Any = "overwrite"
        if self.conditional:
            mode = "create" if base is None else {"e_tag": base}
        exceptions = self._obstore.exceptions
        try:
            result = await self._obstore.put_async(self._client, key, body, mode=mode, use_multipart=False)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Conflict(key) from error
        except self._failures as error:
            raise self._failed("write", key, error) from error
        return result["e_tag"] or ""

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return (self._obstore.exceptions.BaseError, OSError)

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        """Failures that trying again does not mend."""
        exceptions = self._obstore.exceptions
        return (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, exceptions.NotSupportedError, FileNotFoundError)

    def _failed(self, what: str, key: str, error: Exception) -> StorageError:
        reason = str(error).partition("\n\nDebug source")[0].strip()
        hint = ""
        if _NO_BUCKET in reason:
            hint = " Create the bucket first; a store does not make one."
        elif "169.254." in reason or isinstance(error, self._refusals[:2]):
            hint = (
                " Credentials come from the environment of the process that opens the store (AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or a role of the machine), or from S3Store(credentials=...)."
            )
        return StorageError(f"Cannot {what} {key} in {self.url}: {reason}{hint}", path=self.url)


async def pause(attempt: int) -> None:
    """Waits before a further attempt, longer after many, so that writers of one object get out of step."""
    if attempt:
        await asyncio.sleep(random.uniform(0.2, 1.0) * min(0.01 * 2**attempt, 0.25))


async def side_by_side(call: Callable[[A], Awaitable[T]], items: Iterable[A]) -> list[T]:
    """The answers of a call for each item, `SIDE_BY_SIDE` of them on their way at one time."""
    places = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(item: A) -> T:
        async with places:
            return await call(item)

    return list(await asyncio.gather(*map(one, items)))


def _client(location: StoreLocation) -> Client:
    """The client of a location. What the location does not say comes from the environment, credentials above all."""
    options = location.s3
    bucket, _, prefix = location.path.partition("/")
    config: S3Config = {}
    if options.endpoint is not None:
        config["endpoint"] = options.endpoint
    if options.region is not None:
        config["region"] = options.region
    config.update(json.loads(options.credentials or "{}"))
    timeout = timedelta(milliseconds=options.timeout_ms)
    return import_obstore().store.S3Store(  # type: ignore[no-any-return]
        bucket,
        prefix=prefix or None,
        config=config,
        client_options={
            "allow_http": (options.endpoint or "").startswith("http://"),
            "timeout": timeout,
            "connect_timeout": timeout / 2,
        },
        retry_config={"max_retries": 4, "retry_timeout": timeout, "backoff": {"init_backoff": timedelta(milliseconds=50)}},
    )
