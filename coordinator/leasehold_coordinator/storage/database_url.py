"""The setting of the database: the path of a SQLite file, or a URL of SQLAlchemy."""

from pathlib import Path

import sqlalchemy as sa

from leasehold_coordinator.errors import StartError


def database_url(database: str) -> sa.URL:
    """The URL of a database.

    An unescaped "@" in a password would make the rest of the password a part of the host or of the name. No
    message echoes a malformed URL, nor the library's error, which quotes a part of the URL.

    Raises:
        StartError: The URL is malformed.
    """
    if "://" not in database:
        return sa.URL.create("sqlite", database=str(Path(database).expanduser()))
    try:
        url = sa.make_url(database)
    except (sa.exc.ArgumentError, ValueError):
        raise _malformed("it is not SCHEME://USER:PASSWORD@HOST:PORT/NAME with a number as PORT") from None
    if url.get_backend_name() != "sqlite" and "@" in f"{url.host}{url.database}":
        raise _malformed("it has an '@' too many")
    return url


def shown_database(database: str) -> str:
    """The database for messages: the path, or the URL without its password and query.

    The query may hold passwords too, such as that of a client key.

    Raises:
        StartError: The URL is malformed.
    """
    if "://" not in database:
        return database
    return database_url(database).set(query={}).render_as_string(hide_password=True)


def _malformed(why: str) -> StartError:
    return StartError(
        f"the URL of the database is malformed: {why}; correct the setting, and write special characters of "
        "the password as %XX, such as %40 for '@'"
    )
