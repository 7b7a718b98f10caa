# SPDX-License-Identifier: Apache-2.0
# Goal    The boxes of a shard are its elements in their order. Every rank makes the same layout of the shards of all ranks:
#         each element has one owner and one place.
# Method  Every block of small tensors against an enumeration of its elements; layouts of shards as FSDP2
#         cuts them, of replicas, of uneven and empty shards and of pipeline stages; ranks that
#         contradict each other.

import dataclasses
import itertools
import math

import pytest
from forebay.sharded.boxes import BOXES_OF_A_SHARD_MAX, Held, Source, boxes_of, elems_of, make_shard_plan

SHAPES = [(1,), (7,), (1, 1), (4, 6), (5, 1), (1, 5), (3, 4, 2), (2, 1, 3), (2, 3, 2, 2), (2, 2, 1, 3)]


def elements(shape, ranges):
    """The numbers of a block's elements in the whole tensor, in the block's own row-major order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [
        sum(at * stride for at, stride in zip(index, strides))
        for index in itertools.product(*(range(begin, end) for begin, end in ranges))
    ]


def elements_of(boxes):
    return [
        first + stride * at + element
        for first, run, stride, runs in boxes
        for at in range(runs)
        for element in range(run)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_are_the_elements_of_every_block_in_their_order(shape):
    of_dim = [
        [(begin, end) for begin in range(size + 1) for end in range(begin, size + 1)] for size in shape
    ]
    for ranges in itertools.product(*of_dim):
        boxes = boxes_of(shape, ranges)
        want = elements(shape, ranges)
        assert elements_of(boxes) == want, ranges
        assert elems_of(boxes) == len(want), ranges
        assert all(0 < run <= stride and runs > 0 for _, run, stride, runs in boxes), ranges


def test_rows_are_one_box_and_columns_are_one_with_a_stride():
    assert boxes_of([4, 6], [(0, 4), (0, 6)]) == ((0, 24, 24, 1),)
    assert boxes_of([4, 6], [(1, 3), (0, 6)]) == ((6, 12, 12, 1),)
    assert boxes_of([4, 6], [(0, 4), (2, 4)]) == ((2, 2, 6, 4),)
    assert boxes_of([2, 3, 4], [(0, 2), (1, 3), (0, 4)]) == ((4, 8, 12, 2),)
    assert boxes_of([4, 6], [(2, 2), (0, 6)]) == ()


def test_a_block_of_more_boxes_than_the_wire_takes_is_refused():
    most = BOXES_OF_A_SHARD_MAX
    # Dimensions 1 and 2 are cut, so each element of dimension 0 has a box.
    ranges = [(0, most), (0, 2), (0, 1)]
    assert len(boxes_of([most, 3, 2], ranges)) == most
    with pytest.raises(ValueError, match=rf"\[{most + 1}, 3, 2\] has more than {most} boxes"):
        boxes_of([most + 1, 3, 2], [(0, most + 1), (0, 2), (0, 1)])


def chunks(size, parts):
    """[begin, end) of each part, as torch.chunk cuts; the last ones may be empty."""
    step = -(-size // parts)
    return [(min(at * step, size), min((at + 1) * step, size)) for at in range(parts)]


def held(name, shape, rows, group="root", **other):
    """What a rank holds that has these rows."""
    ranges = [rows, *((0, size) for size in shape[1:])]
    values = {"param_group": 0, "trainable": True, **other}
    return Held(name=name, shape=shape, group=group, boxes=boxes_of(shape, ranges), **values)


def sharded(shapes, ranks):
    """What each rank holds of parameters that are cut in rows."""
    return [
        [held(name, shape, chunks(shape[0], ranks)[rank]) for name, shape in shapes.items()]
        for rank in range(ranks)
    ]


def assert_covers(plan):
    """Each element of each parameter is in one box, each box has its place in a partition of its
    owner and group, and the boxes of a partition follow each other."""
    shapes = {name: shape for name, shape, *_ in plan.params}
    seen = {name: [] for name in shapes}
    for (name, box), source in plan.places.items():
        seen[name] += elements_of([box])
        group, owner, replica, boxes = plan.partitions[source.partition]
        param = plan.index[name]
        assert plan.params[param][2] == group and plan.holders[name, box][0] == owner and replica == 0
        at = boxes.index((param, *box))
        assert source.first == elems_of([box[1:] for box in boxes[:at]])
        assert source.elems == elems_of([box])
    for name, numbers in seen.items():
        assert sorted(numbers) == list(range(math.prod(shapes[name]))), name
    assert sum(len(boxes) for *_, boxes in plan.partitions) == len(plan.places)
    keys = [(group, owner) for group, owner, *_ in plan.partitions]
    assert keys == sorted(set(keys)), "one partition for each group and owner, in their order"


UNEVEN = {"a": (3, 64), "b": (1,), "c": (2, 5), "d": (7, 3), "e": (8,)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_uneven_and_empty_shards_cover_every_element_once(ranks):
    plan = make_shard_plan(sharded(UNEVEN, ranks))
    assert_covers(plan)
    assert [name for name, *_ in plan.params] == list(UNEVEN)
    assert plan.group_names == ["root"]
    holders = {owner for _, owner, *_ in plan.partitions}
    assert holders == set(range(ranks)), "each of them has rows of the eight of e"


def test_a_rank_that_holds_nothing_has_no_partition():
    plan = make_shard_plan(sharded({"a": (2, 3)}, 3))
    assert [(group, owner) for group, owner, *_ in plan.partitions] == [(0, 0), (0, 1)]
    assert plan.params == [("a", [2, 3], 0, 0, True)]


def test_replicas_belong_to_the_lowest_rank_that_has_them():
    replicas = make_shard_plan(sharded(UNEVEN, 2) * 2)  # ranks 2 and 3 have what 0 and 1 have
    alone = make_shard_plan(sharded(UNEVEN, 2))
    holders = {key: [rank, rank + 2] for key, (rank,) in alone.holders.items()}
    assert replicas == dataclasses.replace(alone, holders=holders)
    assert {rank for rank, *_ in replicas.holders.values()} == {0, 1}
    first_later = make_shard_plan([[], *sharded(UNEVEN, 2)])
    assert {rank for rank, *_ in first_later.holders.values()} == {1, 2}
    assert_covers(first_later)


def test_a_node_has_what_its_ranks_hold_and_counts_them_from_its_first():
    whole = make_shard_plan(sharded(UNEVEN, 4))
    for ranks in (range(0, 2), range(2, 4)):
        plan = whole.of_node(ranks)
        assert (plan.params, plan.index, plan.first_rank) == (whole.params, whole.index, ranks.start)
        assert {*plan.places} == {key for key, holders in whole.holders.items() if holders[0] in ranks}
        for group, owner, replica, boxes in plan.partitions:
            wanted = [boxes for of, at, _, boxes in whole.partitions if (of, at) == (group, owner + ranks.start)]
            assert [boxes] == wanted and replica == 0
    held_by_none = {name for name, _ in whole.holders} - {name for name, _ in whole.of_node(range(2, 4)).holders}
    assert held_by_none == {"b", "c"}, "their rows are those of ranks 0 and 1"


def test_what_a_rank_of_another_node_owns_is_a_replica():
    whole = make_shard_plan(sharded(UNEVEN, 2) * 2)
    first, second = whole.of_node(range(0, 2)), whole.of_node(range(2, 4))
    assert {replica for *_, replica, _ in first.partitions} == {0}
    assert {replica for *_, replica, _ in second.partitions} == {1}
    assert first.places == second.places
    rows = [held("a", (4,), part) for part in chunks(4, 2)]
    mixed = [[rows[0]], [rows[1]], [rows[0], held("b", (1,), (0, 1))]]
    with pytest.raises(ValueError, match="rank 2 holds parts of root that a rank of another node holds too"):
        make_shard_plan(mixed).of_node(range(2, 3))


def test_groups_and_parameters_are_in_the_order_of_the_model():
    def of_rank(rank):
        rows = chunks(4, 2)[rank]
        return [
            held("layers.0.w", (4, 2), rows, group="layers.0"),
            held("layers.1.w", (4, 2), rows, group="layers.1", param_group=1),
            held("head", (4,), rows, group="root", trainable=False),
            held("layers.0.b", (4,), rows, group="layers.0"),
        ]

    plan = make_shard_plan([of_rank(0), of_rank(1)])
    assert plan.group_names == ["layers.0", "layers.1", "root"]
    assert plan.params == [
        ("layers.0.w", [4, 2], 0, 0, True),
        ("layers.0.b", [4], 0, 0, True),
        ("layers.1.w", [4, 2], 1, 1, True),
        ("head", [4], 2, 0, False),
    ]
    assert plan.index == {name: at for at, (name, *_) in enumerate(plan.params)}
    assert_covers(plan)
    assert plan.partitions[1] == (0, 1, 0, [(0, 4, 4, 4, 1), (1, 2, 2, 2, 1)])
    assert plan.places["layers.0.b", (2, 2, 2, 1)] == Source(partition=1, first=4, elems=2)


def test_pipeline_stages_are_ranks_that_hold_other_parameters():
    stages = [
        [held("0.w", (5, 2), rows, group="0.root") for rows in chunks(5, 2)],
        [held("1.w", (3,), rows, group="1.root") for rows in chunks(3, 2)],
    ]
    plan = make_shard_plan([[stages[rank // 2][rank % 2]] for rank in range(4)])
    assert plan.group_names == ["0.root", "1.root"]
    assert [name for name, *_ in plan.params] == ["0.w", "1.w"]
    assert [(group, owner) for group, owner, *_ in plan.partitions] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert_covers(plan)


@pytest.mark.parametrize(
    ("meshes", "rank"),
    [
        ([[0], [1]], 1),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], 2),
        ([[0, 2], [1, 3], [0, 2], [1, 3]], 1),
        ([[0, 1], [0, 1], [1, 2], [3]], 3),
    ],
    ids=str,
)
def test_ranks_of_two_meshes_that_hold_one_parameter_are_refused_by_its_name(meshes, rank):
    stages = [[held("w", (4, 2), (0, 4))] for _ in meshes]
    message = f"parameter w is on rank 0 and on rank {rank}, and no mesh has both"
    with pytest.raises(ValueError, match=message):
        make_shard_plan(stages, meshes)


def test_meshes_that_share_ranks_join_all_of_them():
    data_and_tensor = [[0, 2, 1], [1, 3, 0], [2, 0, 3], [3, 1, 2]]
    chain = [[0], [0, 1], [1, 2], [2, 3]]
    for meshes in (data_and_tensor, chain, chain[::-1], [[0, 1, 2, 3]] * 4):
        plan = make_shard_plan([[held("w", (4, 2), (0, 4))] for _ in range(4)], meshes)
        assert list(plan.holders.values()) == [[0, 1, 2, 3]]
        assert_covers(plan)


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (4, 3)},
        {"group": "layers.1"},
        {"param_group": 1},
        {"trainable": False},
    ],
    ids=lambda other: next(iter(other)),
)
def test_ranks_that_disagree_about_a_parameter_are_refused_by_its_name(other):
    same = {"shape": (4, 2), "group": "root", "rows": (2, 4)}
    ranks = [
        [held("a", (2,), (0, 1)), held("w", (4, 2), (0, 2))],
        [held("a", (2,), (1, 2)), held("w", **{**same, **other})],
    ]
    with pytest.raises(ValueError, match=r"parameter w is .* on a lower rank and .* on rank 1"):
        make_shard_plan(ranks)
