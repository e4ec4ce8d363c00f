/* The part of the library that all instruction sets share; see build.py and library.py.
 *
 * The kernels call OpenMP. Linked with an OpenMP library, they would bring a second one into a process that has
 * torch's. Therefore, this file defines each function of OpenMP that they use, as a jump to an address that the caller
 * sets.
 *
 * The build defines OPENMP_FUNCTIONS as FUNCTION(name) for each of them, and SOURCE_DIGEST. This file is compiled for
 * the baseline of x86-64, and the library has no constructors: loading it executes none of the kernels' instructions.
 */
#define HIDDEN __attribute__((visibility("hidden")))

/* clang-format off */
#define FUNCTION(name) \
    HIDDEN void *address_of_##name; \
    __asm__(".pushsection .text\n" \
            ".globl " #name "\n" \
            ".hidden " #name "\n" \
            ".type " #name ", @function\n" \
            #name ": jmp *address_of_" #name "(%rip)\n" \
            ".size " #name ", . - " #name "\n" \
            ".popsection");
/* clang-format on */
OPENMP_FUNCTIONS
#undef FUNCTION

/* The digest of the sources and flags that the library was compiled from; build.py searches the file for it. */
const char common_source_digest[] = SOURCE_DIGEST;

/* The names of the functions of OpenMP, each followed by a space. */
const char *common_openmp_functions(void)
{
#define FUNCTION(name) #name " "
    return OPENMP_FUNCTIONS;
#undef FUNCTION
}

/* Set the addresses of these functions, in the same order, before the first call of a kernel. */
void common_set_openmp_functions(void *const *addresses)
{
#define FUNCTION(name) address_of_##name = *addresses++;
    OPENMP_FUNCTIONS
#undef FUNCTION
}
