"""Predictors that `smoe tune --predictor` has fitted to traces of a model. They are stored in the user's cache."""

from __future__ import annotations

from pathlib import Path

from smoe.errors import UnpreparedError
from smoe.load.learned_file import NotLearnedError, keep_learned, learned, path_of
from smoe.prediction.activation_path import RoutedLayer
from smoe.prediction.fitted import Fitted

FORMAT = 2


def place_of(folder: Path, name: str) -> Path:
    """Return the path of the file with the fitted predictor `name` for the model in `folder`."""
    return path_of(name, folder)


def remember(folder: Path, fitted: Fitted) -> Path:
    """Store a fitted predictor of the model in `folder` in the user's cache, atomically. Return the file's path. Raises
    `OSError`."""
    fields = {"predictor": fitted.name, "layers": fitted.layers, "tokens": fitted.tokens}
    return keep_learned(fitted.name, FORMAT, folder, fitted.tensors, fields)


def fitted_of(folder: Path, name: str) -> Fitted:
    """Return the fitted predictor `name` of the model in `folder`.

    Raises `ConfigError` if it is missing, damaged, of another format version, or was fitted for other weights.
    """
    try:
        tensors, fields = learned(name, FORMAT, folder)
        if fields["predictor"] != name:
            raise NotLearnedError(
                f"{place_of(folder, name)} holds the values of the predictor {fields['predictor']}, not of {name}"
            )
    except NotLearnedError as error:
        raise UnpreparedError(
            f"`prefetch={name}`: {error}; run smoe tune on the model with `predictor={name}`, once",
            setting="prefetch",
            given=name,
            allowed="for models that this predictor has been fitted for",
        ) from error
    return Fitted(name, tuple(RoutedLayer(*layer) for layer in fields["layers"]), tensors, fields["tokens"])
