"""Kombu's Redis transport, for workers that go on listening when an acknowledgement was lost."""

from kombu.transport import redis, virtual


class QoS(redis.QoS):
    """Counts a message as done where Redis could not be told.

    Kombu would go on to count it as under way, and a worker that takes one message at a time would never take another,
    though it is connected. Redis gives that message out again after the visibility timeout, which changes nothing.
    """

    def ack(self, delivery_tag: str) -> None:
        """Raises what kombu raises; Celery logs it."""
        try:
            super().ack(delivery_tag)  # type: ignore[no-untyped-call]
        except redis.Transport.connection_errors:
            virtual.QoS.ack(self, delivery_tag)
            raise


class Channel(redis.Channel):
    """As kombu's, with that way of counting."""

    QoS = QoS


class Transport(redis.Transport):
    """As kombu's, with such channels."""

    Channel = Channel
