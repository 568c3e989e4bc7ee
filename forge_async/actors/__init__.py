"""ForgeActor and services, and the Monarch shells around rooms and backends."""
