"""Prefix cache: which blocks hold the keys and values of which tokens after which other tokens.

A node stands for the tokens of one full block and, through its parent, for all tokens before them.
It is found by its parent and its own tokens, the first of a chain by the salt and its tokens, in a
dictionary that compares these keys: two prefixes are the same if and only if all their tokens and
salts are, whatever their hashes. Ids are never used again, so a key whose parent has been
forgotten can never match.

Where several sequences compute the same block at the same time, each writes a block of its own. The
node then names one of these blocks, and the rest are its duplicates. As long as any of them is
used, the node names a used one. Now a sequence that holds a block of a node also holds a block of
each node before it. So the nodes before a used node are used, and no block has to be kept for the
sake of another: unused blocks can be evicted in the order in which they were let go, provided that
each sequence lets go of its last block first.
"""

from collections.abc import Hashable, Sequence
from itertools import batched, count

from paged_jax.memory.block_pool import NULL_BLOCK

type Key = tuple[int | tuple[Hashable], tuple[int, ...]]  # parent's id, or (salt,); tokens


class Node:
    """The contents of one full block, after its parent's contents."""

    __slots__ = ("block", "id", "key")

    def __init__(self, node_id: int, key: Key, block: int):
        self.id = node_id
        self.key = key
        self.block = block  # holds the contents; the null block once they are forgotten

    def __repr__(self) -> str:
        return f"Node({self.id}, parent {self.key[0]!r}, block {self.block})"


class PrefixCache:
    """Finds blocks by their contents. It knows no reference counts: the block manager does."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._ids = count()
        self._nodes: dict[Key, Node] = {}
        self._node_of_block: dict[int, Node] = {}  # duplicates included
        self._duplicates: dict[Node, list[int]] = {}  # of nodes that have some

    def extend(
        self, match: list[Node], salt: Hashable, token_ids: Sequence[int], max_blocks: int
    ) -> None:
        """Bring a match, the known nodes of the tokens' leading blocks, up to date.

        Nodes forgotten since it was found leave it, and nodes found beyond it join it, up to
        `max_blocks` in all. Only tokens beyond the match are looked at: a prompt that waits is
        not looked up afresh in every iteration.
        """
        while match and match[-1].block == NULL_BLOCK:  # a node is forgotten before its parent
            match.pop()
        parent: int | tuple[Hashable] = match[-1].id if match else (salt,)
        nodes, size = self._nodes, self._block_size
        for tokens in batched(token_ids[len(match) * size : max_blocks * size], size):
            node = nodes.get((parent, tokens))
            if node is None:
                return
            match.append(node)
            parent = node.id

    def add(
        self,
        parent: Node | None,
        salt: Hashable,
        token_ids: Sequence[int],
        blocks: Sequence[int],
    ) -> list[Node]:
        """The nodes of these tokens after the parent's; from now on the blocks hold them, too."""
        parent_key: int | tuple[Hashable] = (salt,) if parent is None else parent.id
        nodes, node_of_block, added = self._nodes, self._node_of_block, []
        for tokens, block in zip(batched(token_ids, self._block_size), blocks, strict=True):
            key = parent_key, tokens
            node = nodes.get(key)
            if node is None:
                nodes[key] = node_of_block[block] = node = Node(next(self._ids), key, block)
            elif block not in node_of_block:
                self._duplicates.setdefault(node, []).append(block)
                node_of_block[block] = node
            added.append(node)
            parent_key = node.id
        return added

    def replace(self, node: Node) -> int:
        """Let a duplicate hold the node's contents; returns the block that held them before."""
        block = node.block
        del self._node_of_block[block]
        node.block = self._pop_duplicate(node)
        return block

    def let_go(self, block: int) -> bool:
        """A block's last reference is dropped; returns whether it alone has its contents."""
        node = self._node_of_block.get(block)
        if node is None:
            return False
        if node not in self._duplicates:
            return True
        if node.block == block:
            self.replace(node)
        else:
            del self._node_of_block[block]
            self._pop_duplicate(node, block)
        return False

    def forget(self, block: int) -> None:
        """The contents of a block without references are lost."""
        node = self._node_of_block.pop(block)
        del self._nodes[node.key]
        node.block = NULL_BLOCK

    def forget_chains(self, block: int) -> list[int]:
        """Forget a cached block's contents and all that follow them; returns the blocks of these.

        A block that follows one without references has none either. This looks at every node, so
        it is for faults.
        """
        lost = {self._node_of_block[block].id}
        nodes = [self._node_of_block[block]]
        for node in self._nodes.values():  # a node is younger than its parent
            if node.key[0] in lost:
                lost.add(node.id)
                nodes.append(node)
        blocks = [node.block for node in nodes]
        for each in blocks:
            self.forget(each)
        return blocks

    def _pop_duplicate(self, node: Node, block: int | None = None) -> int:
        duplicates = self._duplicates[node]
        at = -1 if block is None else duplicates.index(block)
        block = duplicates.pop(at)
        if not duplicates:
            del self._duplicates[node]
        return block

    def check_invariants(self, ref_counts: Sequence[int], cached: Sequence[int]) -> None:
        """AssertionError unless nodes and blocks agree; `cached` in the order of eviction."""
        by_id = {node.id: node for node in self._nodes.values()}
        assert len(by_id) == len(self._nodes), "an id was given twice"
        named: dict[int, Node] = {}
        for key, node in self._nodes.items():
            assert node.key == key
            assert len(key[1]) == self._block_size, f"{node} is not full"
            duplicates = self._duplicates.get(node, [])
            for block in (node.block, *duplicates):
                assert block != NULL_BLOCK
                assert block not in named, f"block {block} is that of {named[block]} and {node}"
                named[block] = node
            assert all(ref_counts[block] for block in duplicates), f"unused duplicate of {node}"
            assert ref_counts[node.block] or not duplicates, f"{node} has duplicates in use"
        assert named == self._node_of_block
        assert self._duplicates.keys() <= set(self._nodes.values())
        assert sorted(cached) == sorted(b for b in named if not ref_counts[b])
        order = {block: i for i, block in enumerate(cached)}
        for node in self._nodes.values():
            parent_id = node.key[0]
            if isinstance(parent_id, tuple):
                continue
            assert parent_id in by_id, f"{node} has outlived its parent"
            parent = by_id[parent_id]
            if not ref_counts[parent.block]:
                assert not ref_counts[node.block], f"{node} is used, {parent} is not"
                assert order[node.block] < order[parent.block], (
                    f"{parent} would be evicted before {node}"
                )

    def check_chain(self, last: Node | None, salt: Hashable, blocks: Sequence[int]) -> None:
        """AssertionError unless the blocks hold the nodes of a chain that ends with `last`."""
        nodes = [self._node_of_block[block] for block in blocks]
        assert (nodes[-1] if nodes else None) is last
        parents = [(salt,), *(node.id for node in nodes)]
        assert [node.key[0] for node in nodes] == parents[:-1], "the chain is broken"
