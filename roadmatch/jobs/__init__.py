"""Work that takes longer than a request: imports and deletions of many items, queued in the database."""
