"""A request whose outputs are read one by one."""

from collections.abc import Callable, Iterator

from paged_jax.delivery import Delivery
from paged_jax.outputs import RequestOutput


class OutputStream(Iterator[RequestOutput]):
    """Yields a request's outputs, the last of which is finished; `advance` makes more of them.

    The request goes on while nobody reads. It is aborted when its stream is closed or lost before
    its end.
    """

    def __init__(self, request_id: str, delivery: Delivery, advance: Callable[[], None]):
        self._request_id = request_id
        self._delivery = delivery
        self._advance = advance
        self._mailbox = delivery.open_mailbox([request_id])
        self._is_open = True

    def __next__(self) -> RequestOutput:
        if not self._is_open:
            raise StopIteration
        try:
            while not self._mailbox:
                self._advance()
        except BaseException:
            self.close()
            raise
        output = self._mailbox.popleft()
        if output.finished:
            self._is_open = False
            self._delivery.close_mailbox([self._request_id])
        return output

    def close(self) -> None:
        """Abort the request, if it has not ended; nothing more is yielded."""
        if self._is_open:
            self._is_open = False
            self._delivery.abort(self._request_id)
            self._delivery.close_mailbox([self._request_id])

    def __del__(self) -> None:
        if self._is_open:
            self._delivery.abandon(self._request_id)
