"""The SQL store: tables, migrations, sessions and the change log, the same on SQLite and PostgreSQL."""
