// What every client is asked for.

import { z } from "zod";

export const MODEL = "tiny";
export const Color = z.object({ color: z.enum(["red", "green"]) });
export const City = z.object({ city: z.string() });
export const WEATHER = "Return the weather in a city.";

export function weather({ city }) {
  return `Sunny in ${city}.`;
}
