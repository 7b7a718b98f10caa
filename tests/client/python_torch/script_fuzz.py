# SPDX-License-Identifier: Apache-2.0
"""Training scripts of script_grammar.py, each run with an optimizer of torch's and attached; with sharded_ranks.Ranks both
over a model of FSDP2.

Both sides compute each step from the same bits: after a step was compared, the reference takes over weights and states.
So losses and gradients are equal bit by bit, and only the arithmetic of one update differs, in float32 on both sides;
update_bound.py derives how far these may lie apart. A difference in an earlier step cannot hide in a later one.
"""

import contextlib
import copy
from dataclasses import dataclass, field

import forebay
import torch
from script_grammar import ROWS, VOCAB, WIDTH, Script, Stack, script_of, sharded_form
from sharded_ranks import reshard
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from update_bound import NORM_ROUNDINGS, UNIT, bounds

INITIAL_SCALE = 1024.0

# Differences from torch that are not refused with an error. The grammar generates no script that meets one of them. To test a
# change that removes a difference, remove its name from this set.
#
# zeros_are_no_gradient  After zero_grad(set_to_none=False) torch has a gradient of zeros for each parameter: one that
#                        the next backward does not reach is updated (its moments fall, weight decay applies). Attached,
#                        such a parameter is skipped, as one without a gradient.
# step_forgets_gradients After step() torch's p.grad exists until zero_grad(), and the next backward adds to it. An
#                        attached step() forgets the gradients, as the documentation of zero_grad() says.
# states_begin_with_0    Adagrad's initial_accumulator_value: read_state() of a parameter that was never updated says 0.
KNOWN_DIFFERENCES = {"zeros_are_no_gradient", "step_forgets_gradients", "states_begin_with_0"}


class Invalid(Exception):
    """Torch itself refuses the script: clip_grad_value_ without a gradient, for one."""


class Difference(AssertionError):
    """The two sides are not equal within the bound."""


def grouped(model, script):
    """Parameter groups in torch's form."""
    lists = [[] for _ in range(1 + len(script.groups))]
    for index, parameter in enumerate(model.parameters()):
        lists[index % len(lists)].append(parameter)
    extra = ({}, *script.groups)
    return [{"params": params, **more} for params, more in zip(lists, extra) if params]


def whole(tensor):
    """The values; a DTensor's from all ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor):
    """What can be written into."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Side:
    """A model that trains with its optimizer."""

    script: Script
    model: nn.Module
    opt: torch.optim.Optimizer
    scaler: object = None
    schedule: object = None
    hooks: list = field(default_factory=list)
    observed: list = field(default_factory=list)  # what has to be equal bit by bit
    near: list = field(default_factory=list)  # what has to be equal up to a few roundings

    def __post_init__(self):
        if self.script.scaler:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
        schedulers = torch.optim.lr_scheduler
        if self.script.schedule == "step":
            self.schedule = schedulers.StepLR(self.opt, 1, 0.5)
        elif self.script.schedule == "cosine":
            self.schedule = schedulers.CosineAnnealingLR(self.opt, 5)

    @property
    def is_attached(self):
        return getattr(self.opt, "is_forebay", False)

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        if self.script.model.embeds:
            return torch.randint(VOCAB, (ROWS,), generator=generator)
        return torch.randn(ROWS, WIDTH, generator=generator)

    def loss(self, seed, factor, branch):
        torch.manual_seed(seed)  # of dropout
        loss = self.model(self.batch(seed), branch).square().mean() * factor
        self.observed.append(("loss", loss.detach().clone()))
        return loss if self.scaler is None else self.scaler.scale(loss)

    # ---------------------------------------------------------------------------- before the backwards

    def do_before(self, name, value, step):
        getattr(self, f"_{name}")(value, step)

    def _nothing(self, _value, _step):
        pass

    def _evaluate(self, value, step):
        self.model.eval()
        with torch.no_grad() if value < 0.5 else torch.inference_mode():
            self.observed.append(("evaluation", self.model(self.batch(int(value * 1e4)), step.branch)))
        self.model.train()

    def _deepcopy(self, value, _step):
        other = copy.deepcopy(self.model).eval()
        with torch.no_grad():
            self.observed.append(("copy", other(self.batch(int(value * 1e4)))))
            for parameter in other.parameters():
                parameter.add_(1.0)  # its own

    def _lr(self, value, _step):
        for group in self.opt.param_groups:
            group["lr"] *= 0.5 + value

    def _weight_decay(self, value, _step):
        self.opt.param_groups[-1]["weight_decay"] = 0.1 * value

    def _hook(self, value, _step):
        trained = [one for one in self.model.parameters() if one.requires_grad]
        one = trained[int(value * len(trained))]
        self.hooks.append(one.register_hook(lambda gradient: gradient * 0.5))

    def _module_hook(self, _value, _step):
        self.hooks.append(self.model.head.register_forward_hook(lambda _module, _inputs, output: 2 * output))

    def _backward_hook(self, _value, _step):
        def observe(_module, _into, out):
            self.observed.append(("gradient of an output", out[0].detach().clone()))

        self.hooks.append(self.model.head.register_full_backward_hook(observe))

    def _post_hook(self, _value, _step):
        def halve(parameter):
            parameter.grad.mul_(0.5)

        one = next(one for one in self.model.parameters() if one.requires_grad)
        self.hooks.append(one.register_post_accumulate_grad_hook(halve))

    def _unused_forward(self, value, step):
        self.model(self.batch(int(value * 1e4)), step.branch)

    def _load_state_dict(self, _value, _step):
        self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))

    def _add_group(self, _value, _step):
        self.opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def _freeze(self, value, _step):
        one = next(one for one in self.model.parameters() if one.requires_grad)
        one.requires_grad_(False)

    def _read_state(self, _value, _step):
        if not self.is_attached:
            return  # both sides' states are compared after each step anyway
        for name, _ in self.model.named_parameters():
            self.opt.read_state(name)

    def _train_mode(self, value, _step):
        self.model.train(value < 0.5)

    def _state_dict(self, _value, _step):
        groups = self.opt.state_dict()["param_groups"]
        self.observed.append(("lr", torch.tensor([group["lr"] for group in groups])))

    def _model_state_dict(self, _value, _step):
        for name, values in self.model.state_dict().items():
            self.observed.append((name, values.clone()))

    def _autograd_grad(self, value, step):
        trained = [one for one in self.model.parameters() if one.requires_grad]
        torch.manual_seed(1)
        loss = self.model(self.batch(int(value * 1e4)), step.branch).square().sum()
        for one in torch.autograd.grad(loss, trained, allow_unused=True):
            self.observed.append(("grad", torch.zeros(1) if one is None else one))

    def _zero_grad(self, _value, _step):
        self.opt.zero_grad()

    # ----------------------------------------------------------------------------------- the backwards

    def do_backward(self, kind, factor, seed, step):
        if kind == "sum":
            (self.loss(seed, factor, step.branch) + self.loss(seed + 1, factor, step.branch)).backward()
            return
        if kind == "broken":
            self.break_backward(seed, step)
            return
        if kind == "penalty" and not self.script.model.embeds:
            self.penalty(seed, step).backward()
            return
        loss = self.loss(seed, factor * (float("inf") if kind == "infinite" else 1.0), step.branch)
        loss.backward(retain_graph=kind == "retain")
        if kind == "retain":
            loss.backward()
        elif kind == "dropped":
            self.opt.zero_grad()
        elif kind == "dropped_by_model":
            self.model.zero_grad()

    def penalty(self, seed, step):
        """A loss with the gradient by the inputs in it, as GANs have."""
        torch.manual_seed(seed)
        inputs = self.batch(seed).requires_grad_()
        outputs = self.model(inputs, step.branch)
        (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = outputs.square().mean() + gradient.square().mean()
        self.observed.append(("loss", loss.detach().clone()))
        return loss if self.scaler is None else self.scaler.scale(loss)

    def break_backward(self, seed, step):
        """Ends at the inputs of the head with an error of the script's own, which then leaves the batch out."""

        class Broken(Exception):
            pass

        def fail(_gradient):
            raise Broken

        def watch(_module, inputs):
            inputs[0].register_hook(fail)

        hook = self.model.head.register_forward_pre_hook(watch)
        loss = self.loss(seed, 1.0, step.branch)
        seen, is_sharded = len(self.observed), isinstance(self.model, FSDPModule)
        if is_sharded and not self.is_attached:  # plain FSDP2 cannot train after an exception
            reshard(self.model)
        else:
            with contextlib.suppress(Broken):
                loss.backward()
        if is_sharded:
            del self.observed[seen:]
        hook.remove()
        self.opt.zero_grad()

    # ------------------------------------------------------------------------------------ the gradient

    def do_gradient(self, name, value, step):
        if name == "autograd_grad":
            self._autograd_grad(value, step)
            return
        if self.scaler is not None and name in ("clip_norm", "clip_value", "norm_of_one"):
            with contextlib.suppress(RuntimeError):  # raised if unscale_() was called before
                self.scaler.unscale_(self.opt)
        if name == "clip_norm":
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), value)
            self.near.append(("norm", norm.detach().clone()))
        elif name == "clip_value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), value)
        elif name == "norm_of_one":
            one = next(one for one in self.model.parameters() if one.requires_grad)
            # A parameter that this backward has not reached may have a gradient, which other ranks have delivered.
            norm = torch.zeros(()) if one.grad is None else one.grad.norm().detach().clone()
            self.near.append(("norm of one", norm))
        elif name == "one_to_none":
            next(one for one in self.model.parameters() if one.requires_grad).grad = None
        elif name == "read":
            one = next(one for one in self.model.parameters() if one.requires_grad)
            if one.grad is not None:
                self.near.append(("sum", one.grad.abs().sum()))

    # ---------------------------------------------------------------------------------------- the step

    def do_step(self, call):
        if call == "closure":
            self.opt.step(lambda: torch.zeros(()))
        elif self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()

    def after_step(self, zero):
        on = self.opt if zero.startswith("opt") else self.model
        keeps_zeros = zero.endswith("false") and "zeros_are_no_gradient" not in KNOWN_DIFFERENCES
        if zero != "nothing" or "step_forgets_gradients" in KNOWN_DIFFERENCES:
            on.zero_grad(set_to_none=not keeps_zeros)
        if self.schedule is not None:
            self.schedule.step()


@dataclass
class Result:
    """What came of a script: "equal", or the id of the refusal and the operation that got it."""

    outcome: str
    operation: str = ""
    operations: list = field(default_factory=list)  # operations that both sides have executed


class Run:
    """One script on both sides."""

    def __init__(self, seed, job, break_update=None, script=None, ranks=None):
        self.script, self.seed = script or (sharded_form(seed) if ranks else script_of(seed)), seed
        torch.manual_seed(self.script.model.seed)
        model = Stack(self.script.model)
        twin = copy.deepcopy(model)
        for one in (model, twin) if ranks else ():
            # Layers that share a weight are in the group of the model.
            ranks.shard(one, () if self.script.model.ties == "layers" else one.layers)
        torch_rule = getattr(torch.optim, self.script.rule)
        options = self.script.options
        self.plain = Side(self.script, model, torch_rule(grouped(model, self.script), **options, foreach=False))
        rule = getattr(forebay, self.script.rule)
        named = zip(model.named_parameters(), twin.parameters(), strict=True)
        self.parameters = {name: (plain, ours) for (name, plain), ours in named}
        opt = forebay.attach(twin, rule(params=grouped(twin, self.script), **options), job=job)
        assert opt.mode == ("sharded" if ranks else "shared")
        self.ours = Side(self.script, twin, opt)
        self.operation, self.done = "attach", []
        self.break_update = break_update  # changes the reference, to test this test
        self.norm_clipped = self.is_skipped = False
        self.read = {}  # states, by parameter, after the newest step
        self.remember()

    def remember(self):
        """What a refusal has to leave as it is."""
        self.committed = self.ours.opt.committed_step, self.weights()

    def weights(self):
        return {name: whole(ours).clone() for name, (_, ours) in self.parameters.items()}

    def check_refusal(self, error):
        """It says what to do, and nothing was applied."""
        if not error.hint:
            self.differ(f"no hint: {error}")
        step, weights = self.committed
        now = self.weights()
        if self.ours.opt.committed_step != step or any(not torch.equal(now[name], weights[name]) for name in now):
            self.differ(f"refused, and applied nevertheless: {error}")

    def both(self, operation, call):
        """The call on each side; what it observes is compared."""
        self.operation = operation
        try:
            call(self.plain)
        except (RuntimeError, AssertionError) as error:
            raise Invalid(str(error)) from error
        call(self.ours)
        self.done.append(operation)
        self.compare_observed()

    def compare_observed(self):
        for plain, ours in zip(self.plain.observed, self.ours.observed, strict=True):
            theirs, own = whole(plain[1]).to_dense(), whole(ours[1]).to_dense()
            alike = (theirs == own) | (theirs.isnan() & own.isnan())
            if plain[0] != ours[0] or theirs.shape != own.shape or not alike.all():
                self.differ(f"{plain[0]}: {plain[1]} with torch, {ours[1]} attached")
        for plain, ours in zip(self.plain.near, self.ours.near, strict=True):
            theirs, own = whole(plain[1]), whole(ours[1])
            bound = NORM_ROUNDINGS * UNIT * theirs.abs() + 1e-40
            if own.isnan() and not self.gradients_are_finite():
                continue  # attached, every norm is NaN if any gradient is not finite
            if not (theirs - own).abs() <= bound:
                self.differ(f"{plain[0]}: {theirs} with torch, {own} attached")
        for side in (self.plain, self.ours):
            side.observed.clear()
            side.near.clear()

    def differ(self, what):
        raise Difference(f"script {self.seed}, {self.operation}: {what}\n{self.script}")

    def run(self):
        for number, step in enumerate(self.script.steps):
            self.run_step(step, number)
        self.operation = "buffers"
        for (name, plain), ours in zip(self.plain.model.named_buffers(), self.ours.model.buffers()):
            if not torch.equal(plain, ours):
                self.differ(f"buffer {name}: {plain} with torch, {ours} attached")

    def run_step(self, step, number):
        for name, value in step.before:
            self.both(f"before {name}", lambda side: side.do_before(name, value, step))
        for kind, factor, seed in step.backwards:
            self.both(f"backward {kind}", lambda side: side.do_backward(kind, factor, seed, step))
        self.norm_clipped = False
        for name, value in step.gradient:
            self.both(f"gradient {name}", lambda side: side.do_gradient(name, value, step))
            self.norm_clipped |= name == "clip_norm"
        for _ in range(2 if step.call == "twice" else 1):
            self.one_step(step.call)
            if step.call == "twice":  # torch still has the gradients
                self.plain.opt.zero_grad()
        self.both(f"zero {step.zero}", lambda side: side.after_step(step.zero))

    def one_step(self, call):
        scale = self._unscaled_by(call)
        self.is_skipped = self.script.scaler and not self.gradients_are_finite()
        before = {}
        for name, (parameter, _) in self.parameters.items():
            states = {key: whole(torch.as_tensor(value)).clone() for key, value in self.states(parameter).items()}
            gradient = None if parameter.grad is None else whole(parameter.grad).to_dense() * scale
            before[name] = whole(parameter).clone(), states, gradient
        self.both(f"call {call}", lambda side: side.do_step(call))
        if self.break_update is not None:
            self.break_update(self.plain)
        for name, (parameter, ours) in self.parameters.items():
            self.compare(name, parameter, whole(ours), before[name])
        self.take_over()

    def _unscaled_by(self, call):
        """What GradScaler.step() is still to multiply the gradient with."""
        scaler = self.plain.scaler
        if scaler is None or call == "closure":
            return 1.0
        stage = scaler._per_optimizer_states[id(self.plain.opt)]["stage"]
        return 1.0 if stage is torch.amp.grad_scaler.OptState.UNSCALED else 1.0 / scaler.get_scale()

    def gradients_are_finite(self):
        """Of the reference."""
        gradients = (plain.grad for plain, _ in self.parameters.values() if plain.grad is not None)
        return all(whole(gradient).to_dense().isfinite().all() for gradient in gradients)

    def states(self, parameter):
        """The states of the reference; without a momentum that does not exist yet."""
        found = self.plain.opt.state.get(parameter, {})
        return {key: value for key, value in found.items() if value is not None}

    def compare(self, name, parameter, ours, before):
        old, old_states, gradient = before
        (group,) = (
            group for group in self.plain.opt.param_groups if any(one is parameter for one in group["params"])
        )
        states = self.states(parameter)
        read = self.read[name] = self.ours.opt.read_state(name)
        if not parameter.requires_grad:
            states = {}  # torch's Adagrad has states for frozen parameters too
        if read.get("step", 0) == 0 and "states_begin_with_0" in KNOWN_DIFFERENCES:
            states = {}
        if gradient is None or not parameter.requires_grad or self.is_skipped:
            bound = {"": torch.zeros_like(old)}
        else:
            e_gradient = NORM_ROUNDINGS * UNIT * gradient.abs() if self.norm_clipped else 0.0
            bound = bounds(self.script.rule, group, (old, old_states), gradient, e_gradient)
        self.near_enough(name, whole(parameter), ours, bound[""])
        for key, value in states.items():
            if key == "step":
                if float(value) != float(read["step"]):
                    self.differ(f"{name}: step is {value} with torch, {read['step']} attached")
            else:
                self.near_enough(f"{name}, {key}", whole(value), read[key], bound.get(key, torch.zeros_like(old)))

    def near_enough(self, what, plain, ours, bound):
        wrong = ~((plain - ours).abs() <= bound + 1e-40)
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            place = tuple(where)
            self.differ(
                f"{what}{where}: {plain[place].item():.9g} with torch, {ours[place].item():.9g} attached, bound "
                f"{bound[place].item():.3g}"
            )

    def take_over(self):
        """The reference continues with the bits of the other side."""
        self.remember()
        _, own = self.committed
        with torch.no_grad():
            for name, (parameter, _) in self.parameters.items():
                local(parameter).copy_(own[name])
                read = self.read[name]
                for key, value in self.states(parameter).items():
                    if key != "step" and read.get("step", 0) > 0:
                        local(value).copy_(read[key])
        reshard(self.plain.model)  # frees weights that a forward without a backward has gathered


def run(seed, job, break_update=None, ranks=None):
    """Errors: Difference; ForebayError is a result. With `ranks` of sharded_ranks.py both sides are sharded."""
    one = Run(seed, job, break_update, ranks=ranks)
    try:
        one.run()
        return Result("equal", operations=one.done)
    except Invalid:
        return Result("invalid", one.operation, one.done)
    except forebay.ForebayError as error:
        one.check_refusal(error)
        return Result(error.code, one.operation, one.done)
    finally:
        one.ours.opt.detach()
