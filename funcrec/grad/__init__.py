"""Gradients of a loss over a whole batch or its parts: dense gradients of dense leaves, row gradients of tables."""

import funcrec.core as _core
from funcrec.grad._curvature import fisher_product as fisher_product
from funcrec.grad._curvature import gauss_newton_product as gauss_newton_product
from funcrec.grad._curvature import hvp as hvp
from funcrec.grad._examples import example_dots as example_dots
from funcrec.grad._examples import example_norms as example_norms
from funcrec.grad._examples import gradient_noise_scale as gradient_noise_scale
from funcrec.grad._examples import sum_examples as sum_examples
from funcrec.grad._krylov import Solution as Solution
from funcrec.grad._krylov import Spectrum as Spectrum
from funcrec.grad._krylov import conjugate_gradient as conjugate_gradient
from funcrec.grad._krylov import lanczos as lanczos
from funcrec.grad._micro_batches import accumulate_grads as accumulate_grads
from funcrec.grad._micro_batches import over_micro_batches as over_micro_batches
from funcrec.grad._micro_batches import refuse_in_micro_batches as refuse_in_micro_batches
from funcrec.grad._micro_batches import total_weight as total_weight
from funcrec.grad._noise import key_of_table as key_of_table
from funcrec.grad._noise import row_noise as row_noise
from funcrec.grad._of_rows import OfRows as OfRows
from funcrec.grad._of_rows import of_rows as of_rows
from funcrec.grad._of_rows import taken as taken
from funcrec.grad._per_example import per_example_grads as per_example_grads
from funcrec.grad._private import Private as Private
from funcrec.grad._private import clipped_total as clipped_total
from funcrec.grad._private import noisy_grads as noisy_grads
from funcrec.grad._private import private_grads as private_grads
from funcrec.grad._private import rows_read as rows_read
from funcrec.grad._private import takes_key as takes_key
from funcrec.grad._remat import remat as remat
from funcrec.grad._row_tables import HeldRows as HeldRows
from funcrec.grad._value_and_grad import check_gradients as check_gradients
from funcrec.grad._value_and_grad import loss_and_aux as loss_and_aux
from funcrec.grad._value_and_grad import params_problems as params_problems
from funcrec.grad._value_and_grad import value_and_grad as value_and_grad
from funcrec.grad._value_and_grad import value_grad_and_overflows as value_grad_and_overflows

_core.publish(globals())
