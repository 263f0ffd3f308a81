"""The journal's tables, and what to do about a journal that cannot be used.

Used by `journal.records` alone.
"""

from typing import Final

from podwire.database import Layout

_STEPS: Final = (
    """
    CREATE TABLE endpoint (
        -- AUTOINCREMENT: a number is never given twice, not even after its row is gone
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        network TEXT NOT NULL,
        container_id TEXT NOT NULL,
        if_name TEXT NOT NULL,
        phase TEXT NOT NULL,
        ipv4 TEXT,
        ipv6 TEXT,
        record BLOB NOT NULL
    );
    -- The second guard, should the code above ever be wrong: a living attachment and an address are unique.
    CREATE UNIQUE INDEX endpoint_attachment
        ON endpoint (network, container_id, if_name) WHERE phase != 'deleting';
    CREATE UNIQUE INDEX endpoint_ipv4 ON endpoint (ipv4);
    CREATE UNIQUE INDEX endpoint_ipv6 ON endpoint (ipv6);
    CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    """,
)

LAYOUT: Final = Layout(
    name="journal",
    application_id=0x70777231,  # "pwr1"
    steps=_STEPS,
    if_newer="run the newer podwire that wrote it, or drain the node and move the file and its -recent away",
    if_foreign="give podwire a state_dir of its own",
    if_damaged="the file is damaged: drain the node, move it and its -recent away and start the agent again",
)
