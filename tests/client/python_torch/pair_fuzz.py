# SPDX-License-Identifier: Apache-2.0
"""Training scripts with two models and two optimizers, as GANs have them: each is a job, and a backward through both
brings gradients to either. What is compared, and how near, is as in script_fuzz.py."""

import random
from dataclasses import replace

import forebay
import script_fuzz
from script_grammar import WIDTH, script_of, weighted
from torch.nn import functional

ROUNDS = 2
FORMS = {
    "usual": 4,  # the first learns from outputs that are cut off, the second through the first
    # Outputs are not cut off: the second gets a gradient in the first one's turn, and drops it.
    "attached": 1,
    "frozen": 1,  # the first does not require gradients in the second one's turn
    "together": 1,  # one backward serves both models, then both step
}
ZERO = {"before": 3, "after": 2, "model": 1}


def loop_of(seed):
    """(seeds of the two models, forms of the rounds, where gradients are dropped)."""
    rng = random.Random(seed)
    return [rng.randrange(1 << 20) for _ in range(2)], rng.choices(
        list(FORMS), weights=list(FORMS.values()), k=ROUNDS
    ), weighted(rng, ZERO)


def plain_form(seed):
    """A script whose model takes vectors, without a scaler."""
    script = script_of(seed)
    model = replace(script.model, embeds=False, sparse=False, frozen=(), ties=None, dropout=0.0)
    return replace(script, model=model, scaler=False, schedule=None)


class PairRun:
    """Both models on both sides."""

    def __init__(self, seed, job):
        seeds, self.forms, self.zero = loop_of(seed)
        self.judge, self.maker = (
            script_fuzz.Run(one, f"{job}.{index}", script=plain_form(one)) for index, one in enumerate(seeds)
        )
        self.seed = seed
        self.done = []

    @property
    def operation(self):
        return self.maker.operation if self.is_makers_turn else self.judge.operation

    def run(self):
        for number, form in enumerate(self.forms):
            self.is_makers_turn = False
            if form == "together":
                self.turn(self.judge, form, number, self.losses)
                self.step(self.judge)
                self.step(self.maker)
                self.after(self.judge)
                continue
            self.turn(self.judge, form, number, self.judges_loss)
            self.step(self.judge)
            self.after(self.judge)
            self.is_makers_turn = True
            self.turn(self.maker, form, number, self.makers_loss)
            self.step(self.maker)
            self.after(self.maker)

    def turn(self, run, form, number, loss_of):
        """The backward of one turn, on each side."""

        def backward(judge, maker):
            if self.zero == "before":
                judge.opt.zero_grad()
                maker.opt.zero_grad()
            elif self.zero == "model":
                judge.model.zero_grad()
                maker.model.zero_grad()
            own = run.script.model.seed
            if form == "frozen" and run is self.maker:
                for one in judge.model.parameters():
                    one.requires_grad_(False)
            try:
                loss = loss_of(judge, maker, 100 * number + own, form)
                run_side = judge if run is self.judge else maker
                run_side.observed.append(("loss", loss.detach().clone()))
                loss.backward()
            finally:
                for one in judge.model.parameters():
                    one.requires_grad_(True)

        run.operation = f"turn {form}, zero {self.zero}"
        backward(self.judge.plain, self.maker.plain)
        backward(self.judge.ours, self.maker.ours)
        run.compare_observed()
        self.done.append(run.operation)

    def made(self, maker, seed):
        outputs = maker.model(maker.batch(seed))
        return functional.pad(outputs, (0, WIDTH - outputs.shape[1]))

    def judges_loss(self, judge, maker, seed, form):
        fake = self.made(maker, seed)
        fake = fake if form == "attached" else fake.detach()
        return judge.model(judge.batch(seed + 1)).square().mean() + judge.model(fake).mean()

    def makers_loss(self, judge, maker, seed, _form):
        return judge.model(self.made(maker, seed)).square().mean()

    def losses(self, judge, maker, seed, form):
        return self.judges_loss(judge, maker, seed, "attached") + self.makers_loss(judge, maker, seed, form)

    def step(self, run):
        run.one_step("step")
        self.done.append(run.operation)

    def after(self, run):
        """What the next turn must not have."""
        if self.zero == "after":
            for other in (self.judge, self.maker):
                other.plain.opt.zero_grad()
                other.ours.opt.zero_grad()
        else:  # a step forgets its gradients, see script_fuzz.KNOWN_DIFFERENCES
            run.plain.opt.zero_grad()


def run(seed, job):
    """As script_fuzz.run(); jobs are `job`.0 and `job`.1."""
    one = PairRun(seed, job)
    try:
        one.run()
        return script_fuzz.Result("equal", operations=one.done)
    except forebay.ForebayError as error:
        one.judge.check_refusal(error)
        one.maker.check_refusal(error)
        return script_fuzz.Result(error.code, one.operation, one.done)
    finally:
        one.judge.ours.opt.detach()
        one.maker.ours.opt.detach()
