"""Requests whose outputs are wanted all together, when the last of them has ended."""

import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from paged_jax.delivery import Delivery
from paged_jax.outputs import RequestOutput


def complete(
    request_ids: Sequence[str],
    delivery: Delivery,
    advance: Callable[[], None],
    *,
    progress: bool,
) -> list[RequestOutput]:
    """Call `advance` until all of these have ended; their last outputs, in this order."""
    mailbox = delivery.open_mailbox(request_ids)
    done: dict[str, RequestOutput] = {}
    num_tokens, start = 0, time.perf_counter()
    try:
        with tqdm(total=len(request_ids), unit="request", disable=not progress) as bar:
            while len(done) < len(request_ids):
                advance()
                while mailbox:
                    output = mailbox.popleft()
                    done[output.request_id] = output
                    num_tokens += sum(len(out.token_ids) for out in output.outputs)
                    rate = num_tokens / (time.perf_counter() - start)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s")
                    bar.update()
    finally:
        delivery.close_mailbox(request_ids)
    return [done[request_id] for request_id in request_ids]
