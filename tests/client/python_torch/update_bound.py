# SPDX-License-Identifier: Apache-2.0
"""How far an update in float32 may lie from the same update with its operations in another order."""

import torch

UNIT = 2.0**-24  # float32's unit roundoff
ROUNDINGS = 8  # roundings of one quantity on both sides, with its float32 coefficients
# Roundings of a clipped gradient: of a norm over at most a few hundred elements, and of the quotient.
NORM_ROUNDINGS = 64


def bounds(rule, group, before, gradient, e_gradient, e_states=None):
    """How far apart the two sides may be after one update: {"": of the parameter, state: ...}, each a tensor.

    Each side rounds each operation to float32, which moves a result by at most UNIT of its size; errors of its operands
    propagate as the derivative says.

    before      (parameter, states) of the reference, before the update.
    e_gradient  how far apart the two sides' gradients may be: a tensor, or 0.0.
    e_states    the same of AdamW's moments, from the bounds of the update before. None: the moments are the same bits.
    """
    e = ROUNDINGS * UNIT
    p, states = before
    lr, decay = group["lr"], group["weight_decay"]
    coupled = rule != "AdamW"
    g = gradient + decay * p if coupled else gradient
    e_g = e_gradient + (e * (gradient.abs() + decay * p.abs()) if coupled else 0.0)
    zero = torch.zeros_like(p)
    if rule == "SGD":
        momentum, dampening = group["momentum"], group["dampening"]
        old = states.get("momentum_buffer")
        buffer = g if old is None else momentum * old + (1 - dampening) * g
        e_buffer = e_g + e * (zero if old is None else momentum * old.abs()) + e * g.abs()
        direction, e_d = (buffer, e_buffer) if momentum > 0 else (g, e_g)
        if group["nesterov"]:
            direction, e_d = g + momentum * buffer, e_g + momentum * e_buffer + e * (g.abs() + buffer.abs())
        return {"": lr * e_d + e * (p.abs() + lr * direction.abs()), "momentum_buffer": e_buffer}
    if rule == "Adagrad":
        step = float(states["step"]) + 1
        rate = lr / (1 + (step - 1) * group["lr_decay"])
        total = states["sum"] + g * g
        e_v = e * total + 2 * g.abs() * e_g + e_g * e_g
        return {"": e * p.abs() + _quotient(rate, g, e_g, total, e_v, group["eps"], e), "sum": e_v}
    beta1, beta2 = group["betas"]
    step = float(states.get("step", 0)) + 1
    m0, v0 = states.get("exp_avg", zero), states.get("exp_avg_sq", zero)
    e_m0, e_v0 = (e_states["exp_avg"], e_states["exp_avg_sq"]) if e_states else (zero, zero)
    m, v = beta1 * m0 + (1 - beta1) * g, beta2 * v0 + (1 - beta2) * g * g
    e_m = beta1 * e_m0 + e * (beta1 * m0.abs() + (1 - beta1) * g.abs()) + (1 - beta1) * e_g
    e_v = beta2 * e_v0 + e * v + (1 - beta2) * (2 * g.abs() * e_g + e_g * e_g)
    top = torch.maximum(v, states.get("max_exp_avg_sq", zero)) if group["amsgrad"] else v
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    e_top = e_v / correction2
    moved = _quotient(lr / correction1, m, e_m, top / correction2, e_top, group["eps"], e)
    bound = {"": e * p.abs() + moved, "exp_avg": e_m, "exp_avg_sq": e_v}
    return bound | ({"max_exp_avg_sq": e_v} if group["amsgrad"] else {})


def _quotient(rate, m, e_m, v, e_v, eps, e):
    """Of rate * m / (sqrt(v) + eps), where m and v are off by e_m and e_v."""
    root = v.sqrt()
    e_root = torch.minimum(e_v / (2 * root).clamp_min(1e-45), e_v.sqrt()) + e * root
    least = (root - e_root).clamp_min(0) + eps
    value = m.abs() / (root + eps)
    return rate * (e_m / least + value * e_root / least + e * value)
