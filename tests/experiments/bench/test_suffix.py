"""What the benchmark of suffix trees compares: both structures count the same."""

from experiments.bench.suffix import Tree, Trie, text_of


def test_both_structures_count_alike() -> None:
    tokens = text_of(400, lambda text: [ord(letter) for letter in text])
    assert tokens[:200] == tokens[200:]
    tree, trie = Tree(5), Trie(5)
    tree.extend(tokens)
    trie.extend(tokens)
    for start in range(0, 395, 7):
        string, node = tokens[start : start + 5], 0
        for size, token in enumerate(string, 1):
            node = trie.nodes[node, token]
            place = tree.tree.find(string[:size])
            assert place is not None and place[0].count_at(place[1]) == trie.counts[node]
