"""Parameters without elements. They are in no handle, so their counters are kept here."""

from . import convert, layout


def count(groups, names, group_index, position, p, steps=1):
    """Adds steps to the counters of one parameter. Makes its state if it has none for its
    recipe."""
    identity, recipe = names.identities([p])[p], names.recipe(group_index, position)
    state, packed = groups.state[p], layout.pack_recipe(recipe)
    if "step" not in state or "recipe" not in state or int(state["recipe"]) != packed:
        rule = groups.row_of(groups[group_index])
        numbers = {key: state.get(key) for key in layout.numbers_of(rule, ())}
        state.setdefault("step", 0)
        state.update(convert.empty(recipe, groups.options.hypers(groups[group_index]), p))
        state.update(
            (key, layout.number(0, key) if value is None else value)
            for key, value in numbers.items()
        )
        state["id"] = layout.number(layout.signed(identity), "id")
        state["recipe"] = layout.recipe_number(recipe)
    steps = layout.step_count(state, names.of(group_index, position)) + steps
    state["step"] = layout.number(float(steps), "step")
    state.update((key, layout.number(steps, key)) for key in layout.COUNTERS)


def sync(groups, names):
    """Sets the other counters to `step` in states where somebody has changed that."""
    for g, i, p in groups.members():
        state = groups.state.get(p) if p.numel() == 0 else None
        if state and "state_steps" in state:
            steps = layout.step_count(state, names.of(g, i))
            if not layout.same_count(state["state_steps"].item(), steps):
                state.update((key, layout.number(steps, key)) for key in layout.COUNTERS)
